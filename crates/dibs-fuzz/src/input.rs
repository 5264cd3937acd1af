//! Reading operations from the fuzzer's bytes.

use arbitrary::Unstructured;

/// The bytes that are left. Once they are used up, every number is zero.
pub(crate) struct Input<'a>(Unstructured<'a>);

impl<'a> Input<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(Unstructured::new(bytes))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn u8(&mut self) -> u8 {
        self.0.arbitrary().unwrap_or(0)
    }

    pub(crate) fn u16(&mut self) -> u16 {
        self.0.arbitrary().unwrap_or(0)
    }

    pub(crate) fn u32(&mut self) -> u32 {
        self.0.arbitrary().unwrap_or(0)
    }

    pub(crate) fn u64(&mut self) -> u64 {
        self.0.arbitrary().unwrap_or(0)
    }

    pub(crate) fn flag(&mut self) -> bool {
        self.u8() & 1 != 0
    }

    /// Calls `step` as long as there is something left and it goes on, `most` times at most.
    pub(crate) fn each(mut self, most: usize, mut step: impl FnMut(&mut Self) -> bool) {
        for _ in 0..most {
            if self.is_empty() || !step(&mut self) {
                break;
            }
        }
    }

    /// A number below `n`, which is not zero.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        usize::from(self.u8()) % n
    }

    /// Mostly small, sometimes anything: for fields that count or number things.
    pub(crate) fn small_or_any(&mut self) -> u64 {
        match self.u8() {
            253 => u64::from(self.u16()),
            254 => u64::from(self.u32()),
            255 => self.u64(),
            small => u64::from(small),
        }
    }

    /// `N` bytes, zeros behind the end.
    pub(crate) fn array<const N: usize>(&mut self) -> [u8; N] {
        self.0.arbitrary().unwrap_or([0; N])
    }

    /// Up to `n` bytes, as many as there are.
    pub(crate) fn bytes(&mut self, n: usize) -> &'a [u8] {
        let n = n.min(self.0.len());
        self.0.bytes(n).unwrap_or(&[])
    }

    /// Up to 255 bytes, by a length in front.
    pub(crate) fn block(&mut self) -> &'a [u8] {
        let len = self.u8();
        self.bytes(usize::from(len))
    }

    /// What is left.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        self.bytes(usize::MAX)
    }
}
