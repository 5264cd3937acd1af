//! Reading and writing big-endian fields with bounds checks.

/// Input ended before a field was complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("input ends within a field")]
pub struct Truncated;

/// Takes fields off the front of a slice.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads from the start of `bytes`.
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Bytes that have not been read yet.
    pub const fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// True if everything has been read.
    pub const fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// The next `n` bytes.
    #[inline]
    pub fn take(&mut self, n: usize) -> Result<&'a [u8], Truncated> {
        let (head, tail) = self.rest.split_at_checked(n).ok_or(Truncated)?;
        self.rest = tail;
        Ok(head)
    }

    /// The next `N` bytes as an array.
    #[inline]
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Truncated> {
        self.array_ref().copied()
    }

    /// A reader of the next `N` bytes: fields together cost one check of the length.
    #[inline]
    pub fn part<const N: usize>(&mut self) -> Result<Reader<'a>, Truncated> {
        self.array_ref::<N>().map(|part| Reader::new(part))
    }

    #[inline]
    fn array_ref<const N: usize>(&mut self) -> Result<&'a [u8; N], Truncated> {
        let (head, tail) = self.rest.split_first_chunk::<N>().ok_or(Truncated)?;
        self.rest = tail;
        Ok(head)
    }

    /// The next byte.
    #[inline]
    pub fn u8(&mut self) -> Result<u8, Truncated> {
        self.array().map(u8::from_be_bytes)
    }

    /// The next 16-bit number.
    #[inline]
    pub fn u16(&mut self) -> Result<u16, Truncated> {
        self.array().map(u16::from_be_bytes)
    }

    /// The next 32-bit number.
    #[inline]
    pub fn u32(&mut self) -> Result<u32, Truncated> {
        self.array().map(u32::from_be_bytes)
    }

    /// The next 64-bit number.
    #[inline]
    pub fn u64(&mut self) -> Result<u64, Truncated> {
        self.array().map(u64::from_be_bytes)
    }
}

/// Appends fields to the front of a slice that the caller has sized.
///
/// Writing past the end is a bug of the caller and panics, as any slice index would.
#[derive(Debug)]
pub struct Writer<'a> {
    buf: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    /// Writes from the start of `buf`.
    #[inline]
    pub fn new(buf: &'a mut [u8]) -> Self {
        Self { buf, at: 0 }
    }

    /// Bytes written so far.
    pub const fn len(&self) -> usize {
        self.at
    }

    /// True if nothing has been written.
    pub const fn is_empty(&self) -> bool {
        self.at == 0
    }

    /// A writer of the next `N` bytes: fields together cost one check of the length.
    #[inline]
    pub fn part<const N: usize>(&mut self) -> Writer<'_> {
        let at = self.at;
        self.at += N;
        Writer::new(&mut self.buf[at..][..N])
    }

    /// Appends `bytes`.
    #[inline]
    pub fn put(&mut self, bytes: &[u8]) {
        self.buf[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }

    /// Appends a byte.
    #[inline]
    pub fn u8(&mut self, v: u8) {
        self.put(&[v]);
    }

    /// Appends a 16-bit number.
    #[inline]
    pub fn u16(&mut self, v: u16) {
        self.put(&v.to_be_bytes());
    }

    /// Appends a 32-bit number.
    #[inline]
    pub fn u32(&mut self, v: u32) {
        self.put(&v.to_be_bytes());
    }

    /// Appends a 64-bit number.
    #[inline]
    pub fn u64(&mut self, v: u64) {
        self.put(&v.to_be_bytes());
    }
}
