//! Nothing outside the slices is read or written: they lie against pages without any access.
#![cfg(unix)]
#![allow(unsafe_code)]

use std::ptr;

use dibs_gcm::Key;

const PAGE: usize = 4096;
/// Bytes that may be touched.
const ROOM: usize = 2 * PAGE;

/// Memory with a forbidden page on either side.
struct Guarded(*mut u8);

impl Guarded {
    fn new() -> Self {
        // SAFETY: a new private mapping, whose pages in the middle are then opened.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let all = libc::mmap(
                ptr::null_mut(),
                ROOM + 2 * PAGE,
                libc::PROT_NONE,
                flags,
                -1,
                0,
            );
            assert_ne!(all, libc::MAP_FAILED, "mmap");
            let middle = all.cast::<u8>().add(PAGE);
            let access = libc::PROT_READ | libc::PROT_WRITE;
            assert_eq!(libc::mprotect(middle.cast(), ROOM, access), 0, "mprotect");
            Self(middle)
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: these pages are mapped for as long as `self` lives, and nothing else uses them.
        unsafe { std::slice::from_raw_parts_mut(self.0, ROOM) }
    }

    /// `len` bytes at the beginning or the end.
    fn at_edge(&mut self, end: bool, len: usize) -> &mut [u8] {
        let start = if end { ROOM - len } else { 0 };
        &mut self.bytes()[start..][..len]
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made; nothing borrows from it any more.
        unsafe { libc::munmap(self.0.sub(PAGE).cast(), ROOM + 2 * PAGE) };
    }
}

#[test]
fn slices_against_forbidden_pages() {
    let Some(key) = Key::new(&[0x77; 32]) else {
        eprintln!("NOT TESTED: this CPU has no vectors for AES-GCM");
        return;
    };
    let (mut aad, mut text) = (Guarded::new(), Guarded::new());
    let lengths: Vec<usize> = (0..=300).chain(1400..=1600).collect();
    for end in [false, true] {
        for &long in &lengths {
            for (aad_len, text_len) in [(long, long % 130), (long % 130, long)] {
                aad.bytes().fill(0x11);
                text.bytes().fill(0x22);
                let aad_bytes = &*aad.at_edge(end, aad_len);
                let tag = key.seal(&[1; 12], aad_bytes, text.at_edge(end, text_len));
                assert!(key.open(&[1; 12], aad_bytes, text.at_edge(end, text_len), &tag));
                assert!(!key.open(&[2; 12], aad_bytes, text.at_edge(end, text_len), &tag));
                let touched = text.bytes().iter().position(|&byte| byte != 0x22);
                assert_eq!(touched, None, "lengths {aad_len} and {text_len}");
            }
        }
    }
}

/// Beside the text within its page: what a forbidden page does not show.
#[test]
fn nothing_beside_the_text_is_written() {
    let Some(key) = Key::new(&[0x77; 32]) else {
        eprintln!("NOT TESTED: this CPU has no vectors for AES-GCM");
        return;
    };
    for len in 0..=400 {
        let mut bytes = vec![0x22; len + 256];
        key.seal(&[1; 12], &[3; 20], &mut bytes[128..][..len]);
        let (before, after) = (&bytes[..128], &bytes[128 + len..]);
        assert!(
            before.iter().chain(after).all(|&b| b == 0x22),
            "length {len}"
        );
    }
}
