//! Which threads run before others (setpriority(2), for which Linux takes a thread for a process).

use std::io;

/// The niceness of the calling thread.
#[allow(unsafe_code)]
pub fn niceness() -> i32 {
    // SAFETY: no pointers. It cannot fail for the calling thread.
    unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }
}

/// Sets that of a thread, 0 for the calling one. Below what it is takes CAP_SYS_NICE, or RLIMIT_NICE that allows it.
#[allow(unsafe_code)]
pub fn set_niceness(thread: u32, nice: i32) -> io::Result<()> {
    // SAFETY: no pointers.
    match unsafe { libc::setpriority(libc::PRIO_PROCESS, thread, nice) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
