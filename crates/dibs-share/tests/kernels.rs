//! Every kernel against the definitions computed byte by byte.

mod naive;

use dibs_share::{Kernel, MAX_SHARES, Scheme};
use naive::{noise, shares};
use proptest::{collection::vec, prelude::*, sample::Index};

/// What stands around the places written to.
const AROUND: u8 = 0xa5;

/// Splits at `offset` in larger buffers, and looks that nothing around is touched.
fn split_at(
    kernel: Kernel,
    scheme: Scheme,
    secret: &[u8],
    random: &[u8],
    offset: usize,
) -> Vec<Vec<u8>> {
    let len = secret.len();
    let whole = || vec![AROUND; offset + len + 70];
    let mut buffers: Vec<_> = (0..scheme.shares()).map(|_| whole()).collect();
    let mut places: Vec<_> = buffers
        .iter_mut()
        .map(|buffer| &mut buffer[offset..][..len])
        .collect();
    scheme.split_on(kernel, secret, random, &mut places);
    for buffer in &mut buffers {
        let after = buffer.split_off(offset + len);
        let before = buffer.drain(..offset);
        let untouched = before.chain(after).all(|byte| byte == AROUND);
        assert!(untouched, "{}, {len} bytes at {offset}", kernel.name());
    }
    buffers
}

fn join_at(
    kernel: Kernel,
    scheme: Scheme,
    shares: &[Vec<u8>],
    indices: &[u8],
    offset: usize,
) -> Vec<u8> {
    let len = shares[0].len();
    // Each share has an alignment of its own.
    let moved: Vec<_> = indices
        .iter()
        .map(|&index| {
            let before = vec![0; offset + usize::from(index)];
            [&before[..], &shares[usize::from(index)]].concat()
        })
        .collect();
    let given: Vec<_> = indices
        .iter()
        .zip(&moved)
        .map(|(&index, moved)| (index, &moved[offset + usize::from(index)..]))
        .collect();
    let mut buffer = vec![AROUND; offset + len + 70];
    scheme
        .join_on(kernel, &given, &mut buffer[offset..][..len])
        .expect("as many shares as needed");
    let after = buffer.split_off(offset + len);
    let before = buffer.drain(..offset);
    let untouched = before.chain(after).all(|byte| byte == AROUND);
    assert!(untouched, "{}, {len} bytes at {offset}", kernel.name());
    buffer
}

#[test]
fn every_length() {
    for (needed, n) in [(2, 2), (3, 3), (2, 3), (3, 5), (7, 32)] {
        let scheme = Scheme::new(needed, n).expect("a scheme that exists");
        for len in 0..=330 {
            let secret = noise(1, len);
            let random = noise(2, scheme.randomness(len));
            let expected = shares(scheme, &secret, &random);
            for kernel in Kernel::available() {
                let context = || format!("{}, {needed} of {n}, {len} bytes", kernel.name());
                let split = split_at(kernel, scheme, &secret, &random, len % 67);
                assert!(split == expected, "split, {}", context());
                let indices: Vec<_> = (n - needed..n).rev().collect();
                let joined = join_at(kernel, scheme, &split, &indices, len % 67);
                assert!(joined == secret, "join, {}", context());
            }
        }
    }
}

/// With every byte times every factor that a share of two has, each lane of each kernel is tried.
#[test]
fn every_product() {
    let scheme = Scheme::new(2, MAX_SHARES).expect("a scheme that exists");
    let random: Vec<u8> = (0..=u8::MAX).cycle().take(256 + 97).collect();
    let secret = vec![0; random.len()];
    let expected = shares(scheme, &secret, &random);
    for kernel in Kernel::available() {
        let split = split_at(kernel, scheme, &secret, &random, 0);
        assert!(split == expected, "{}", kernel.name());
        // And every factor that joining has.
        for a in 0..MAX_SHARES {
            for b in (0..MAX_SHARES).filter(|b| *b != a) {
                let joined = join_at(kernel, scheme, &split, &[a, b], 0);
                assert!(joined == secret, "{}, {a} and {b}", kernel.name());
            }
        }
    }
}

#[test]
fn the_best_kernel_is_the_first() {
    assert_eq!(Kernel::available().next(), Some(Kernel::best()));
    assert_eq!(
        Kernel::available().last().map(Kernel::name),
        Some("portable")
    );
}

proptest! {
    #[test]
    fn any_scheme(
        (needed, n) in (2..=MAX_SHARES).prop_flat_map(|n| (2..=n, Just(n))),
        secret in vec(any::<u8>(), 0..2000),
        seed in any::<u64>(),
        offset in 0..70_usize,
        first in any::<Index>(),
    ) {
        let scheme = Scheme::new(needed, n).expect("a scheme that exists");
        let random = noise(seed, scheme.randomness(secret.len()));
        let expected = shares(scheme, &secret, &random);
        let first = first.index(n.into()) as u8;
        let indices: Vec<_> = (0..needed).map(|i| (first + i) % n).collect();
        for kernel in Kernel::available() {
            let split = split_at(kernel, scheme, &secret, &random, offset);
            prop_assert_eq!(&split, &expected, "split, {}", kernel.name());
            let joined = join_at(kernel, scheme, &split, &indices, offset);
            prop_assert_eq!(&joined, &secret, "join, {}", kernel.name());
        }
    }
}
