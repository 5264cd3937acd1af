//! What a scheme promises: enough shares give the secret, fewer say nothing.

mod naive;

use dibs_share::{InvalidScheme, JoinError, MAX_SHARES, Scheme};
use naive::noise;
use proptest::{collection::vec, prelude::*};

fn scheme(needed: u8, shares: u8) -> Scheme {
    Scheme::new(needed, shares).expect("a scheme that exists")
}

fn split(scheme: Scheme, secret: &[u8], random: &[u8]) -> Vec<Vec<u8>> {
    let mut shares = vec![vec![0xee; secret.len()]; scheme.shares().into()];
    let mut places: Vec<_> = shares.iter_mut().map(Vec::as_mut_slice).collect();
    scheme.split(secret, random, &mut places);
    shares
}

/// The sets of indices out of `shares`, as bits.
fn subsets(shares: u8) -> impl Iterator<Item = (u32, Vec<u8>)> {
    (0..1_u32 << shares).map(move |set| {
        let members = (0..shares).filter(|index| set >> index & 1 == 1);
        (set, members.collect())
    })
}

fn pick<'a>(shares: &'a [Vec<u8>], indices: &[u8]) -> Vec<(u8, &'a [u8])> {
    let share = |&index| (index, &shares[usize::from(index)][..]);
    indices.iter().map(share).collect()
}

#[test]
fn products_as_published() {
    // The examples of FIPS 197, 4.2 and 4.2.1: what 0x57 gives times x. Sharing a 0 in two with the
    // coefficient 0x57, that is the share at x, of index x - 1.
    let shares = split(scheme(2, 32), &[0], &[0x57]);
    for (x, product) in [
        (1, 0x57),
        (2, 0xae),
        (4, 0x47),
        (8, 0x8e),
        (0x10, 0x07),
        (0x13, 0xfe),
    ] {
        assert_eq!(shares[x - 1], [product], "at {x}");
    }
    let shares = split(scheme(2, 32), &[0xff], &[0x57]);
    assert_eq!(shares[0x12], [0xfe ^ 0xff], "the secret is added");
}

#[test]
fn by_hand() {
    // 0x80 + 0x01 x + 0x53 x^2. The squares of 1, 2 and 3 are 1, 4 and 5; 0x53 times 4 is 0x57, and
    // times 5 thus 0x04.
    let shares = split(scheme(3, 4), &[0x80], &[0x01, 0x53]);
    assert_eq!(shares[0], [0x80 ^ 0x01 ^ 0x53]);
    assert_eq!(shares[1], [0x80 ^ 0x02 ^ 0x57]);
    assert_eq!(shares[2], [0x80 ^ 0x03 ^ 0x04]);
    // The pads as they are, and the secret XOR both.
    let shares = split(scheme(3, 3), b"ab", &[1, 2, 4, 8]);
    assert_eq!(shares, [[1, 2], [4, 8], [b'a' ^ 5, b'b' ^ 10]]);
}

#[test]
fn every_set_of_enough_shares_gives_the_secret() {
    for shares in 2..=7 {
        for needed in 2..=shares {
            let scheme = scheme(needed, shares);
            let secret = noise(1, 71);
            let split = split(scheme, &secret, &noise(2, scheme.randomness(secret.len())));
            for (set, mut indices) in subsets(shares) {
                if indices.len() % 2 == 1 {
                    indices.reverse();
                }
                let mut joined = vec![0; secret.len()];
                let result = scheme.join(&pick(&split, &indices), &mut joined);
                if indices.len() >= usize::from(needed) {
                    assert_eq!(result, Ok(()), "{scheme:?}, {set:b}");
                    assert_eq!(joined, secret, "{scheme:?}, {set:b}");
                } else {
                    let given = indices.len();
                    assert_eq!(result, Err(JoinError::TooFew { given, needed }));
                    assert_eq!(joined, vec![0; secret.len()], "left as it was");
                }
            }
        }
    }
}

/// Over all random bytes, and for every secret, what a set of k - 1 shares shows takes each of its
/// values equally often. So it is independent of the secret.
#[test]
fn fewer_shares_say_nothing() {
    for (needed, shares) in [(2, 2), (2, 3), (2, 32)] {
        let scheme = scheme(needed, shares);
        for secret in 0..=u8::MAX {
            let mut seen = vec![[0; 256]; shares.into()];
            for random in 0..=u8::MAX {
                for (index, share) in split(scheme, &[secret], &[random]).iter().enumerate() {
                    seen[index][usize::from(share[0])] += 1;
                }
            }
            assert!(
                seen.iter().all(|counts| *counts == [1; 256]),
                "{scheme:?} of {secret}"
            );
        }
    }
}

/// The same for pairs of shares where three are needed.
#[test]
fn fewer_of_three_say_nothing() {
    for shares in [3, 4] {
        let scheme = scheme(3, shares);
        for secret in [0x00, 0x01, 0x57, 0xff] {
            let pairs: Vec<_> = subsets(shares)
                .filter(|(_, pair)| pair.len() == 2)
                .collect();
            let mut seen = vec![vec![0_u8; 1 << 16]; pairs.len()];
            for random in 0..=u16::MAX {
                let split = split(scheme, &[secret], &random.to_be_bytes());
                for (seen, (_, pair)) in seen.iter_mut().zip(&pairs) {
                    let [a, b] = [pair[0], pair[1]].map(|index| split[usize::from(index)][0]);
                    seen[usize::from(u16::from_be_bytes([a, b]))] += 1;
                }
            }
            for (seen, (_, pair)) in seen.iter().zip(&pairs) {
                let once = seen.iter().all(|count| *count == 1);
                assert!(once, "{scheme:?}: the shares {pair:?} of {secret}");
            }
        }
    }
}

#[test]
fn schemes_that_do_not_exist() {
    for needed in 0..=u8::MAX {
        for shares in 0..=u8::MAX {
            let exists = needed >= 2 && needed <= shares && shares <= MAX_SHARES;
            let scheme = Scheme::new(needed, shares);
            assert_eq!(scheme.is_ok(), exists, "{needed} of {shares}");
            if let Ok(scheme) = scheme {
                assert_eq!((scheme.needed(), scheme.shares()), (needed, shares));
                assert_eq!(scheme.randomness(7), 7 * (usize::from(needed) - 1));
            }
        }
    }
    for (needed, shares, sentence) in [
        (
            1,
            3,
            "1 of 3 shares: at least 2 have to be needed, as 1 would be the secret",
        ),
        (4, 3, "4 of 3 shares: no more can be needed than there are"),
        (2, 33, "33 shares: at most 32 are possible"),
    ] {
        let error: InvalidScheme = Scheme::new(needed, shares).expect_err("no scheme");
        assert_eq!(error.to_string(), sentence);
    }
}

#[test]
fn shares_that_do_not_belong_together() {
    for scheme in [scheme(2, 3), scheme(2, 2)] {
        let shares = scheme.shares();
        let (a, b) = ([1; 10], [2; 10]);
        let join = |given: &[(u8, &[u8])]| {
            let mut secret = [9; 10];
            let error = scheme.join(given, &mut secret).expect_err("no secret");
            assert_eq!(secret, [9; 10], "left as it was");
            error
        };
        let index = shares;
        let unknown = JoinError::UnknownIndex { index, shares };
        assert_eq!(join(&[(0, &a), (index, &b)]), unknown);
        let index = u8::MAX;
        let unknown = JoinError::UnknownIndex { index, shares };
        assert_eq!(join(&[(index, &a), (0, &b)]), unknown);
        let repeated = JoinError::Repeated { index: 1 };
        assert_eq!(join(&[(1, &a), (1, &b)]), repeated);
        for share in [0, 9] {
            let length = JoinError::Length { share, secret: 10 };
            assert_eq!(join(&[(0, &a), (1, &b[..share])]), length);
        }
        let length = JoinError::Length {
            share: 11,
            secret: 10,
        };
        assert_eq!(join(&[(0, &[0; 11]), (1, &b)]), length);
        let few = JoinError::TooFew {
            given: 1,
            needed: 2,
        };
        assert_eq!(join(&[(0, &a)]), few);
    }
}

#[test]
fn further_shares_are_ignored() {
    let scheme = scheme(2, 3);
    let split = split(scheme, b"text", &[1, 2, 3, 4]);
    let mut given = pick(&split, &[2, 0]);
    given.extend([(0, &[][..]), (200, b"none")]);
    let mut joined = [0; 4];
    assert_eq!(scheme.join(&given, &mut joined), Ok(()));
    assert_eq!(&joined, b"text");
}

#[test]
fn nothing_is_shared_as_nothing() {
    for scheme in [scheme(2, 2), scheme(2, 3)] {
        let split = split(scheme, &[], &[]);
        assert!(split.iter().all(Vec::is_empty));
        assert_eq!(scheme.join(&pick(&split, &[1, 0]), &mut []), Ok(()));
    }
}

#[test]
#[should_panic(expected = "the random bytes of its scheme")]
fn random_bytes_must_be_as_many() {
    split(scheme(2, 3), &[1, 2], &[1]);
}

#[test]
#[should_panic(expected = "the shares of its scheme")]
fn shares_must_be_as_many() {
    scheme(2, 3).split(&[1], &[1], &mut [&mut [0], &mut [0]]);
}

#[test]
#[should_panic(expected = "the length of the secret")]
fn lengths_must_agree() {
    scheme(2, 2).split(&[1], &[1], &mut [&mut [0], &mut [0, 0]]);
}

proptest! {
    #[test]
    fn any_shares_of_any_scheme(
        (needed, shares) in (2..=MAX_SHARES).prop_flat_map(|shares| (2..=shares, Just(shares))),
        secret in vec(any::<u8>(), 0..700),
        seed in any::<u64>(),
        order in Just((0..MAX_SHARES).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        let scheme = scheme(needed, shares);
        let random = noise(seed, scheme.randomness(secret.len()));
        let split = split(scheme, &secret, &random);
        prop_assert_eq!(&split, &naive::shares(scheme, &secret, &random));
        let indices: Vec<_> = order.into_iter().filter(|index| *index < shares).collect();
        let mut joined = vec![0; secret.len()];
        scheme
            .join(&pick(&split, &indices[..needed.into()]), &mut joined)
            .expect("as many shares as needed");
        prop_assert_eq!(joined, secret);
    }
}
