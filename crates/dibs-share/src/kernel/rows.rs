//! How every kernel goes over the rows.

/// Registers that are summed up at a time.
const GROUP: usize = 4;

/// The operations of a kernel on one register `V` of `LEN` bytes.
pub(super) struct Register<Z, P, T, S> {
    /// A register of zeros.
    pub(super) zero: Z,
    /// A register plus bytes.
    pub(super) plus: P,
    /// A register plus a factor times bytes.
    pub(super) plus_times: T,
    /// Stores a register.
    pub(super) store: S,
}

impl<Z, P, T, S> Register<Z, P, T, S> {
    /// The sum of the rows times their factors, all rows being as long as `out`, and that not
    /// shorter than a register.
    ///
    /// Column by column, so that each byte of a row is read once and each of the sum written once,
    /// except those of the last register: it reaches back over what is done already.
    #[inline(always)]
    pub(super) fn sum<V: Copy, const LEN: usize>(
        &self,
        out: &mut [u8],
        factors: &[u8],
        rows: &[&[u8]],
    ) where
        Z: Fn() -> V,
        P: Fn(V, &[u8; LEN]) -> V,
        T: Fn(V, u8, &[u8; LEN]) -> V,
        S: Fn(V, &mut [u8; LEN]),
    {
        let mut at = 0;
        while out.len() - at >= GROUP * LEN {
            self.columns::<V, LEN, GROUP>(out, factors, rows, at);
            at += GROUP * LEN;
        }
        while out.len() - at >= LEN {
            self.columns::<V, LEN, 1>(out, factors, rows, at);
            at += LEN;
        }
        if at < out.len() {
            let at = out.len() - LEN;
            self.columns::<V, LEN, 1>(out, factors, rows, at);
        }
    }

    /// `N` registers from the column `at` on.
    #[inline(always)]
    fn columns<V: Copy, const LEN: usize, const N: usize>(
        &self,
        out: &mut [u8],
        factors: &[u8],
        rows: &[&[u8]],
        at: usize,
    ) where
        Z: Fn() -> V,
        P: Fn(V, &[u8; LEN]) -> V,
        T: Fn(V, u8, &[u8; LEN]) -> V,
        S: Fn(V, &mut [u8; LEN]),
    {
        let mut sums = [(); N].map(|()| (self.zero)());
        for (&by, row) in factors.iter().zip(rows) {
            let (bytes, _) = row[at..][..N * LEN].as_chunks();
            for (sum, bytes) in sums.iter_mut().zip(bytes) {
                *sum = if by == 1 {
                    (self.plus)(*sum, bytes)
                } else {
                    (self.plus_times)(*sum, by, bytes)
                };
            }
        }
        let (places, _) = out[at..][..N * LEN].as_chunks_mut();
        for (sum, place) in sums.into_iter().zip(places) {
            (self.store)(sum, place);
        }
    }
}
