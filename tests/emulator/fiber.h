// Switching between stacks: a few instructions on x86-64, ucontext elsewhere, and what AddressSanitizer must be told.
#pragma once
#include <stddef.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__) || defined(GK_EMULATOR_UCONTEXT)
#define GK_FIBER_UCONTEXT
#include <ucontext.h>
#endif

namespace gk::emulator {

#if defined(GK_FIBER_UCONTEXT)
struct Context {
    ucontext_t state;
};
inline void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }
inline void make_context(Context& context, char* stack, size_t size, void (*entry)()) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = stack;
    context.state.uc_stack.ss_size = size;
    context.state.uc_link = nullptr;
    makecontext(&context.state, entry, 0);
}
#else
struct Context {
    void* stack_pointer;
};
// Saves the registers that a function must preserve on the one stack and takes them from the other.
extern "C" void gk_emulator_switch(void** from, void* to);
asm(R"(
.text
.weak gk_emulator_switch
.type gk_emulator_switch, @function
gk_emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size gk_emulator_switch, .-gk_emulator_switch
)");
inline void switch_context(Context& from, Context& to) { gk_emulator_switch(&from.stack_pointer, to.stack_pointer); }
inline void make_context(Context& context, char* stack, size_t size, void (*entry)()) {
    // What gk_emulator_switch pops: six registers, then where to return to; above it an empty return address, so that
    // the stack is aligned as after a call.
    void** top = reinterpret_cast<void**>(stack + size);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    context.stack_pointer = top;
}
#endif

// A stack that an earlier fiber has left, perhaps in the middle of a function.
inline void clear_stack(char* stack, size_t size) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack, size);
#endif
    (void)stack, (void)size;
}

// From the scheduler's stack to a fiber's, and back.
class Switcher {
  public:
    void enter(Context& fiber, char* stack, size_t size) {
#if defined(__SANITIZE_ADDRESS__)
        void* fake;
        __sanitizer_start_switch_fiber(&fake, stack, size);
#endif
        switch_context(scheduler_, fiber);
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
        (void)stack, (void)size;
    }
    void entered() {  // the first thing that a fiber does
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack_, &scheduler_size_);
#endif
    }
    void leave(Context& fiber, bool for_ever) {
#if defined(__SANITIZE_ADDRESS__)
        void* fake;
        __sanitizer_start_switch_fiber(for_ever ? nullptr : &fake, scheduler_stack_, scheduler_size_);
#endif
        (void)for_ever;
        switch_context(fiber, scheduler_);
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(fake, &scheduler_stack_, &scheduler_size_);
#endif
    }

  private:
    Context scheduler_ = {};
#if defined(__SANITIZE_ADDRESS__)
    const void* scheduler_stack_ = nullptr;
    size_t scheduler_size_ = 0;
#endif
};

}  // namespace gk::emulator
