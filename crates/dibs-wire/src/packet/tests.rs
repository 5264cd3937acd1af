use super::*;
use crate::checksum;
use crate::emit::{Headers, MAX_HEADERS, complete_checksum};
use crate::virtio::{self, VirtioHdr};

fn v4() -> FlowKey {
    FlowKey::tcp(([10, 0, 1, 1], 40000), ([10, 0, 1, 2], 80))
}

fn v6() -> FlowKey {
    FlowKey {
        src: "fd00::1".parse().unwrap(),
        dst: "fd00::2".parse().unwrap(),
        ..v4()
    }
}

fn headers(tuple: FlowKey) -> Headers<'static> {
    let label = if tuple.src.is_ipv6() { 0xabcde } else { 0 };
    Headers {
        tuple,
        meta: IpMeta {
            tos: 0x2,
            ttl: 61,
            flow_label: label,
        },
        seq: SeqNumber::new(0xffff_fff0),
        ack: SeqNumber::new(77),
        flags: flags::ACK | flags::PSH | 0x100,
        window: 502,
        urgent: 0,
        timestamps: Some((1, 2)),
        options: None,
    }
}

fn packet(h: &Headers<'_>, payload: &[u8]) -> Vec<u8> {
    let mut buf = vec![0; MAX_HEADERS + payload.len()];
    h.write(&mut buf, payload.len(), 0);
    buf.truncate(h.encoded_len());
    buf.extend_from_slice(payload);
    buf
}

#[test]
fn an_emitted_segment_parses_back() {
    for tuple in [v4(), v6()] {
        let h = headers(tuple);
        let bytes = packet(&h, b"hello");
        let Ok(Packet::Tcp(s)) = parse(&bytes[virtio::LEN..]) else {
            panic!("not TCP")
        };
        assert_eq!(
            (s.tuple, s.meta, s.seq, s.ack),
            (h.tuple, h.meta, h.seq, h.ack)
        );
        assert_eq!(
            (s.flags, s.window, s.timestamps),
            (h.flags, h.window, h.timestamps)
        );
        assert!(s.has_plain_options());
        assert_eq!(s.payload, b"hello");
        assert_eq!(&bytes[virtio::LEN + s.payload_at..], b"hello");
    }
}

#[test]
fn the_completed_checksum_verifies() {
    for tuple in [v4(), v6()] {
        let mut bytes = packet(&headers(tuple), b"odd");
        let (head, ip) = bytes.split_at_mut(virtio::LEN);
        let header = VirtioHdr::decode(head.first_chunk().unwrap()).unwrap();
        assert!(complete_checksum(&header, ip));
        let upper = &ip[usize::from(header.csum_start)..];
        let sum =
            checksum::pseudo_header(tuple.src, tuple.dst, TCP, upper.len()) + checksum::sum(upper);
        assert_eq!(checksum::fold(sum), 0xffff);
        if tuple.src.is_ipv4() {
            assert_eq!(checksum::fold(checksum::sum(&ip[..20])), 0xffff);
        }
    }
}

#[test]
fn every_truncation_is_an_error() {
    for tuple in [v4(), v6()] {
        let bytes = packet(&headers(tuple), b"payload");
        let whole = &bytes[virtio::LEN..];
        for len in 0..whole.len() {
            assert!(parse(&whole[..len]).is_err(), "length {len}");
        }
    }
}

#[test]
fn what_cannot_be_cut_is_opaque() {
    let mut md5 = headers(v4());
    let mut option = [1u8; 20];
    option[..2].copy_from_slice(&[19, 18]);
    md5.options = Some(&option);
    let bytes = packet(&md5, b"x");
    assert!(matches!(
        parse(&bytes[virtio::LEN..]),
        Ok(Packet::Opaque(_))
    ));

    let mut fragment = packet(&headers(v4()), b"x");
    fragment[virtio::LEN + 6] = 0x20;
    let Ok(Packet::Opaque(o)) = parse(&fragment[virtio::LEN..]) else {
        panic!("not opaque")
    };
    assert!(o.fragment);

    let mut malformed = packet(&headers(v4()), b"x");
    malformed[virtio::LEN + 20 + 20 + 3] = 1;
    assert!(matches!(
        parse(&malformed[virtio::LEN..]),
        Ok(Packet::Opaque(_))
    ));
}

#[test]
fn trailing_bytes_are_cut_off() {
    let mut bytes = packet(&headers(v6()), b"abc");
    bytes.extend_from_slice(b"padding");
    let Ok(Packet::Tcp(s)) = parse(&bytes[virtio::LEN..]) else {
        panic!("not TCP")
    };
    assert_eq!(s.payload, b"abc");
}

#[test]
fn arbitrary_bytes_never_panic() {
    let mut state = 1u64;
    for _ in 0..200_000 {
        let mut bytes = [0u8; 72];
        for b in &mut bytes {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            *b = (state >> 33) as u8;
        }
        bytes[0] = if state & 1 == 0 { 0x45 } else { 0x60 };
        if state & 6 != 0 {
            bytes[2] = 0;
            bytes[4] = 0;
            bytes[6] = TCP;
            bytes[9] = TCP;
        }
        let len = (state >> 40) as usize % 73;
        let _ = parse(&bytes[..len]);
    }
}

#[test]
fn a_checksum_is_not_written_into_the_ip_header() {
    for (first, len) in [(0x45, 20), (0x4f, 60), (0x60, 40)] {
        let mut packet = vec![1u8; 100];
        packet[0] = first;
        let before = packet.clone();
        let mut header = VirtioHdr {
            needs_csum: true,
            csum_start: len - 1,
            csum_offset: 6,
            ..VirtioHdr::default()
        };
        assert!(!complete_checksum(&header, &mut packet));
        assert_eq!(packet, before);
        header.csum_start = len;
        assert!(complete_checksum(&header, &mut packet));
    }
    assert!(!complete_checksum(&VirtioHdr::default(), &mut []));
}
