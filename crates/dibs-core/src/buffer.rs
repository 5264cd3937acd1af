//! Buffers that travel through the core: filled by IO, held while chunks wait, used again.

/// Bytes of a large buffer: a virtio header and the longest IP packet, or a GSO send of 64 KiB, with
/// room to align.
pub const BUFFER_LEN: usize = 64 * 1024 + 512;

/// Bytes of a small buffer: a short run of datagrams, a small packet.
pub const SMALL_LEN: usize = 4 * 1024;

/// Bytes of a buffer in between: what each of very many flows has to send at a time.
pub const MIDDLE_LEN: usize = 16 * 1024;

/// A buffer of [`BUFFER_LEN`], [`MIDDLE_LEN`] or [`SMALL_LEN`] bytes.
pub type Buffer = Box<[u8]>;

/// Buffers that are not in use.
///
/// The pool keeps a bounded number of them, so that a burst does not hold memory for ever; how many
/// are in use is bounded by those who hold them.
#[derive(Debug)]
pub struct Pool {
    large: Vec<Buffer>,
    middle: Vec<Buffer>,
    small: Vec<Buffer>,
    keep: usize,
}

impl Pool {
    /// An empty pool that keeps up to `keep` returned buffers of each size.
    pub const fn new(keep: usize) -> Self {
        Self {
            large: Vec::new(),
            middle: Vec::new(),
            small: Vec::new(),
            keep,
        }
    }

    /// A large buffer with unspecified content.
    pub fn take(&mut self) -> Buffer {
        self.take_for(BUFFER_LEN)
    }

    /// Bytes of the buffer that [`take_for`](Self::take_for) gives for `len` bytes.
    ///
    /// # Panics
    /// If `len` exceeds [`BUFFER_LEN`].
    pub const fn len_for(len: usize) -> usize {
        assert!(len <= BUFFER_LEN, "no buffer holds as many bytes");
        if len <= SMALL_LEN {
            SMALL_LEN
        } else if len <= MIDDLE_LEN {
            MIDDLE_LEN
        } else {
            BUFFER_LEN
        }
    }

    /// A buffer for `len` bytes, with unspecified content.
    ///
    /// # Panics
    /// If `len` exceeds [`BUFFER_LEN`].
    pub fn take_for(&mut self, len: usize) -> Buffer {
        let len = Self::len_for(len);
        self.class(len)
            .pop()
            .unwrap_or_else(|| vec![0; len].into_boxed_slice())
    }

    fn class(&mut self, len: usize) -> &mut Vec<Buffer> {
        match len {
            BUFFER_LEN => &mut self.large,
            MIDDLE_LEN => &mut self.middle,
            SMALL_LEN => &mut self.small,
            len => panic!("a buffer of {len} bytes is not of this pool"),
        }
    }

    /// Gives a buffer back.
    pub fn give(&mut self, buffer: Buffer) {
        let keep = self.keep;
        let class = self.class(buffer.len());
        if class.len() < keep {
            class.push(buffer);
        }
    }
}
