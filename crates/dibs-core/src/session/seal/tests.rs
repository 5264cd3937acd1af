use proptest::prelude::*;

use super::*;
use crate::session::established::{Agreement, Session};
use crate::session::keys::{HandshakeKeys, Integrity, KeyOrigin, Role};
use crate::time::Time;

const SUITES: [Suite; 2] = [Suite::Aes256Gcm, Suite::ChaCha20Poly1305];

fn pair(suite: Suite, integrity: Integrity) -> (Session, Session) {
    pair_within(suite, integrity, KeyLimits::default())
}

fn pair_within(suite: Suite, integrity: Integrity, limits: KeyLimits) -> (Session, Session) {
    let keys = || HandshakeKeys {
        hash: [1; 32],
        initiator: Secret::new([2; 32]),
        responder: Secret::new([3; 32]),
    };
    let end = |role, local_index, remote_index| {
        let agreement = Agreement {
            role,
            suite,
            integrity,
            origin: KeyOrigin::Trusted,
            local_index,
            remote_index,
        };
        Session::new(Time::ZERO, Time::from_nanos(1), agreement, &keys(), limits)
    };
    (
        end(Role::Initiator, 0xa, 0xb),
        end(Role::Responder, 0xb, 0xa),
    )
}

fn datagram(payload: &[u8], header: &[u8]) -> Vec<u8> {
    [&[0; CLEAR_HEADER_LEN], payload, header, &[0; TAG_LEN]].concat()
}

/// A datagram of `from`, with `seq` as its content.
fn sealed(from: &mut Session, path: u8, seq: u64) -> Vec<u8> {
    let mut buf = datagram(b"payload", &seq.to_be_bytes());
    assert_eq!(
        from.seal(&mut buf, PathId::new(path), seq, 8, false),
        Ok(())
    );
    buf
}

/// Opens a copy of `datagram`; the header it carries.
fn open(to: &mut Session, datagram: &[u8]) -> Result<Vec<u8>, OpenError> {
    let mut copy = datagram.to_vec();
    to.open(&mut copy).map(|opened| opened.header.to_vec())
}

#[test]
fn the_clear_header_has_its_layout_and_nothing_else_shows() {
    let (mut a, _) = pair(Suite::Aes256Gcm, Integrity::On);
    let mut buf = datagram(b"payload", b"header block");
    a.seal(&mut buf, PathId::new(3), 0x0102_0304_0506_0708, 12, false)
        .unwrap();
    assert_eq!(buf[..2], [4, 3]);
    assert_eq!(buf[4..16], [0, 0, 0, 0xb, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(&buf[16..23], b"payload", "in its published form");
    assert_ne!(&buf[23..35], b"header block");

    let mut sealed = datagram(b"payload", b"header block");
    a.seal(&mut sealed, PathId::new(3), u64::MAX - 1, 12, true)
        .unwrap();
    assert_ne!(&sealed[16..23], b"payload");
}

#[test]
fn equal_shapes_look_different_on_the_wire() {
    let (mut a, _) = pair(Suite::Aes256Gcm, Integrity::On);
    let shapes: std::collections::BTreeSet<_> = (0..64)
        .map(|seq| {
            let buf = sealed(&mut a, 0, seq);
            [buf[2], buf[3]]
        })
        .collect();
    assert!(shapes.len() > 56, "64 draws of 65536: {}", shapes.len());
}

#[test]
fn directions_and_paths_do_not_mix() {
    for suite in SUITES {
        let (mut a, mut b) = pair(suite, Integrity::On);
        let mut reflected = sealed(&mut a, 0, 0);
        reflected[7] = 0xa;
        assert!(open(&mut a, &reflected).is_err());
        let mut moved = sealed(&mut a, 0, 1);
        moved[1] = 1;
        assert!(open(&mut b, &moved).is_err());
    }
}

#[test]
fn a_replay_is_refused_and_a_forgery_does_not_move_the_window() {
    let (mut a, mut b) = pair(Suite::Aes256Gcm, Integrity::On);
    let late = sealed(&mut a, 0, 5);
    let mut forged = sealed(&mut a, 0, 1_000_000);
    *forged.last_mut().unwrap() ^= 1;
    assert_eq!(open(&mut b, &forged), Err(OpenError::Unauthentic));
    assert!(open(&mut b, &late).is_ok());
    assert_eq!(open(&mut b, &late), Err(OpenError::Replayed));
    assert!(
        open(&mut b, &sealed(&mut a, 1, 5)).is_ok(),
        "another path counts for itself"
    );
}

#[test]
fn a_sequence_number_is_never_used_twice() {
    let (mut a, _) = pair(Suite::Aes256Gcm, Integrity::On);
    sealed(&mut a, 0, 7);
    let mut buf = datagram(b"", b"");
    for seq in [7, 6, 0, u64::MAX] {
        assert_eq!(
            a.seal(&mut buf, PathId::new(0), seq, 0, false),
            Err(SealError::SequenceReused)
        );
    }
    assert_eq!(a.seal(&mut buf, PathId::new(1), 7, 0, false), Ok(()));
}

#[test]
fn what_does_not_fit_is_the_callers_error() {
    let (mut a, _) = pair(Suite::Aes256Gcm, Integrity::Off);
    assert_eq!(
        a.seal(&mut [0; OVERHEAD - 1], PathId::new(0), 0, 0, false),
        Err(SealError::Layout)
    );
    assert_eq!(
        a.seal(&mut [0; OVERHEAD + 4], PathId::new(0), 0, 5, false),
        Err(SealError::Layout)
    );
    let mut huge = vec![0; OVERHEAD + MAX_HEADER_BLOCK + 1];
    let too_long = MAX_HEADER_BLOCK + 1;
    assert_eq!(
        a.seal(&mut huge, PathId::new(0), 0, too_long, false),
        Err(SealError::Layout)
    );
    assert_eq!(
        a.seal_bare(&mut [0; CLEAR_HEADER_LEN], PathId::new(0), 0, 1),
        Err(SealError::Layout)
    );
    assert_eq!(
        a.seal(&mut [0; OVERHEAD], PathId::new(0), 0, 0, false),
        Ok(()),
        "no number was used up"
    );
}

#[test]
fn keys_ratchet_by_volume_and_then_sending_stops() {
    for suite in SUITES {
        let limits = KeyLimits {
            per_phase: 10,
            phases: 4,
            previous_kept: 4,
        };
        let (mut a, mut b) = pair_within(suite, Integrity::On, limits);
        let mut kinds = Vec::new();
        let mut late = None;
        for seq in 0..40 {
            let buf = sealed(&mut a, (seq % 3) as u8, seq);
            kinds.push(buf[0]);
            // The last of each phase comes after the first of the next one.
            if seq % 10 == 9 {
                late = Some(buf);
                continue;
            }
            assert_eq!(open(&mut b, &buf), Ok(seq.to_be_bytes().to_vec()));
            if let Some(late) = late.take() {
                assert!(
                    open(&mut b, &late).is_ok(),
                    "the phase before is kept for a while"
                );
            }
        }
        let expected: Vec<u8> = (0..40).map(|seq| 4 + (seq / 10 % 2) as u8).collect();
        assert_eq!(kinds, expected);
        assert!(a.rekey_at() == Time::ZERO, "another session is overdue");
        let mut buf = datagram(b"", b"");
        assert_eq!(
            a.seal(&mut buf, PathId::new(0), 40, 0, false),
            Err(SealError::Exhausted)
        );
    }
}

#[test]
fn the_previous_phase_is_forgotten_in_time() {
    let limits = KeyLimits {
        per_phase: 10,
        phases: 4,
        previous_kept: 4,
    };
    let (mut a, mut b) = pair_within(Suite::Aes256Gcm, Integrity::On, limits);
    let all: Vec<_> = (0..20).map(|seq| sealed(&mut a, 0, seq)).collect();
    for buf in &all[..8] {
        assert!(open(&mut b, buf).is_ok());
    }
    assert!(open(&mut b, &all[10]).is_ok());
    assert!(open(&mut b, &all[8]).is_ok());
    for buf in &all[11..14] {
        assert!(open(&mut b, buf).is_ok());
    }
    assert_eq!(open(&mut b, &all[9]), Err(OpenError::Unauthentic));
}

#[test]
fn a_phase_may_follow_while_the_one_before_last_is_kept() {
    let limits = KeyLimits {
        per_phase: 2,
        phases: 9,
        previous_kept: 100,
    };
    let (mut a, mut b) = pair_within(Suite::ChaCha20Poly1305, Integrity::On, limits);
    for seq in 0..18 {
        let buf = sealed(&mut a, 0, seq);
        assert_eq!(
            open(&mut b, &buf),
            Ok(seq.to_be_bytes().to_vec()),
            "at {seq}"
        );
    }
}

#[test]
fn bare_datagrams_need_the_agreement_of_both() {
    let bare = |from: &mut Session| {
        let mut buf = [&[0; CLEAR_HEADER_LEN], b"payload".as_slice(), b"head"].concat();
        from.seal_bare(&mut buf, PathId::new(0), 9, 4).map(|()| buf)
    };
    let (mut on, mut on_too) = pair(Suite::Aes256Gcm, Integrity::On);
    assert_eq!(bare(&mut on), Err(SealError::IntegrityRequired));

    let (mut a, mut b) = pair(Suite::Aes256Gcm, Integrity::Off);
    let mut buf = bare(&mut a).unwrap();
    assert_eq!(open(&mut on_too, &buf), Err(OpenError::BareRefused));
    for _ in 0..2 {
        let opened = b.open(&mut buf).ok().unwrap();
        assert!(!opened.authenticated && !opened.payload_inside);
        assert_eq!((opened.path_id.get(), opened.seq), (0, 9));
        assert_eq!(
            (opened.header, &*opened.payload),
            (b"head".as_slice(), b"payload".as_slice())
        );
    }
    assert!(
        open(&mut b, &sealed(&mut a, 0, 10)).is_ok(),
        "the window is not touched"
    );
}

proptest! {
    #[test]
    fn what_is_sealed_opens(
        suite in prop_oneof![Just(Suite::Aes256Gcm), Just(Suite::ChaCha20Poly1305)],
        payload in proptest::collection::vec(any::<u8>(), 0..1500),
        header in proptest::collection::vec(any::<u8>(), 0..120),
        path in any::<u8>(),
        seq in 0..u64::MAX,
        payload_inside in any::<bool>(),
    ) {
        let (mut a, mut b) = pair(suite, Integrity::On);
        let mut buf = datagram(&payload, &header);
        a.seal(&mut buf, PathId::new(path), seq, header.len(), payload_inside).unwrap();
        let opened = b.open(&mut buf).ok().unwrap();
        prop_assert_eq!(opened.header, header);
        prop_assert_eq!(&*opened.payload, payload);
        prop_assert_eq!((opened.path_id.get(), opened.seq), (path, seq));
        prop_assert!(opened.authenticated && opened.payload_inside == payload_inside);
    }

    #[test]
    fn a_flipped_bit_anywhere_is_refused(
        suite in prop_oneof![Just(Suite::Aes256Gcm), Just(Suite::ChaCha20Poly1305)],
        payload in proptest::collection::vec(any::<u8>(), 0..200),
        header in proptest::collection::vec(any::<u8>(), 0..60),
        payload_inside in any::<bool>(),
        at in any::<prop::sample::Index>(),
        bit in 0..8u8,
        integrity in prop_oneof![Just(Integrity::On), Just(Integrity::Off)],
    ) {
        let (mut a, mut b) = pair(suite, integrity);
        let mut buf = datagram(&payload, &header);
        a.seal(&mut buf, PathId::new(1), 77, header.len(), payload_inside).unwrap();
        let at = at.index(buf.len());
        let mut forged = buf.clone();
        forged[at] ^= 1_u8 << bit;
        // With integrity off the type may turn into the bare one, which is then told apart.
        let authentic = b.open(&mut forged).is_ok_and(|opened| opened.authenticated);
        prop_assert!(!authentic);
        prop_assert!(b.open(&mut buf).is_ok(), "the true one still comes through");
    }

    #[test]
    fn a_cut_or_grown_datagram_is_refused(
        length in 0..400usize,
        payload_inside in any::<bool>(),
    ) {
        let (mut a, mut b) = pair(Suite::Aes256Gcm, Integrity::On);
        let mut buf = datagram(&[7; 100], &[8; 30]);
        a.seal(&mut buf, PathId::new(1), 77, 30, payload_inside).unwrap();
        let whole = buf.len();
        buf.resize(length, 0);
        prop_assert_eq!(b.open(&mut buf).is_ok(), length == whole);
    }

    #[test]
    fn open_stands_any_bytes(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..200),
        kind in 3..8u8,
        integrity in prop_oneof![Just(Integrity::On), Just(Integrity::Off)],
    ) {
        let (_, mut b) = pair(Suite::Aes256Gcm, integrity);
        if bytes.len() >= 8 {
            bytes[0] = kind;
            bytes[4..8].copy_from_slice(&0xb_u32.to_be_bytes());
        }
        let authentic = b.open(&mut bytes).is_ok_and(|opened| opened.authenticated);
        prop_assert!(!authentic);
    }

    /// Datagrams of several phases, out of order by less than a phase, all come through.
    #[test]
    fn phases_stand_reordering(jumps in proptest::collection::vec(0..16u64, 300)) {
        let limits = KeyLimits { per_phase: 32, phases: 64, previous_kept: 17 };
        let (mut a, mut b) = pair_within(Suite::ChaCha20Poly1305, Integrity::On, limits);
        let mut order: Vec<(u64, u64)> =
            jumps.iter().enumerate().map(|(seq, jump)| (seq as u64 + jump, seq as u64)).collect();
        order.sort_unstable();
        let all: Vec<_> = (0..300).map(|seq| sealed(&mut a, 0, seq)).collect();
        for (_, seq) in order {
            prop_assert_eq!(open(&mut b, &all[seq as usize]), Ok(seq.to_be_bytes().to_vec()));
        }
    }
}
