//! What the allocator keeps.

/// Blocks from here on are mapped, and unmapped when they are freed: glibc's own first value.
#[cfg(target_env = "gnu")]
const LARGE: libc::c_int = 128 << 10;

/// Has large blocks go back to the system as soon as they are freed. glibc raises what it calls large to
/// the largest block that was ever freed, up to 32 MiB: then lists that are made every few seconds and
/// thrown away lie in the heap, which keeps their size for good, holes and all.
pub fn give_back_large_blocks() {
    #[cfg(target_env = "gnu")]
    #[allow(unsafe_code)]
    // SAFETY: no pointers; glibc takes its lock. It refuses nothing but what is above 32 MiB.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
    }
}
