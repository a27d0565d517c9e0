// Switching between stacks: a few instructions on x86-64, ucontext elsewhere, and what AddressSanitizer must be told.
#pragma once
#include <stddef.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace gk::emulator {

#if !defined(__x86_64__)
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

// clear_stack: of a stack that an earlier fiber has left, perhaps in the middle of a function.
#if defined(__SANITIZE_ADDRESS__)
inline void clear_stack(char* stack, size_t size) { __asan_unpoison_memory_region(stack, size); }
inline void start_switch(void** fake, const void* stack, size_t size) {
    __sanitizer_start_switch_fiber(fake, stack, size);
}
inline void finish_switch(void* fake, const void** stack, size_t* size) {
    __sanitizer_finish_switch_fiber(fake, stack, size);
}
#else
inline void clear_stack(char*, size_t) {}
inline void start_switch(void**, const void*, size_t) {}
inline void finish_switch(void*, const void**, size_t*) {}
#endif

// From the scheduler's stack to a fiber's, and back.
class Switcher {
  public:
    void enter(Context& fiber, char* stack, size_t size) {
        void* fake = nullptr;
        start_switch(&fake, stack, size);
        switch_context(scheduler_, fiber);
        finish_switch(fake, nullptr, nullptr);
    }
    // The first thing that a fiber does.
    void entered() { finish_switch(nullptr, &scheduler_stack_, &scheduler_size_); }
    void leave(Context& fiber, bool for_ever) {
        void* fake = nullptr;
        start_switch(for_ever ? nullptr : &fake, scheduler_stack_, scheduler_size_);
        switch_context(fiber, scheduler_);
        finish_switch(fake, &scheduler_stack_, &scheduler_size_);
    }

  private:
    Context scheduler_ = {};
    const void* scheduler_stack_ = nullptr;
    size_t scheduler_size_ = 0;
};

}  // namespace gk::emulator
