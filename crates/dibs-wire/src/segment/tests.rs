use proptest::prelude::*;

use super::*;

const ALL_FLAGS: u8 = 0xff;

/// A frame as the kernel makes it: partial checksum, TCP options.
fn frame(ipv6: bool, payload: &[u8], mss: u16) -> Vec<u8> {
    let tcp_len = 32;
    let transport = (tcp_len + payload.len()) as u16;
    let mut packet = if ipv6 {
        let mut ip = vec![0x60, 0, 0, 0];
        ip.extend(transport.to_be_bytes());
        ip.extend([TCP, 64]);
        ip.extend([0x20; 16]);
        ip.extend([0x30; 16]);
        ip
    } else {
        let mut ip = vec![0x45, 0];
        ip.extend((20 + transport).to_be_bytes());
        ip.extend([0, 0, 0x40, 0, 64, TCP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        ip
    };
    let start = packet.len() as u16;
    packet.extend([0x12, 0x34, 0x56, 0x78]);
    packet.extend(0xffff_ff00u32.to_be_bytes());
    packet.extend([0, 0, 0, 7, 0x80, ALL_FLAGS, 1, 2, 0, 0, 0, 0]);
    packet.extend([1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2]);
    packet.extend(payload);
    let header = VirtioHdr {
        needs_csum: true,
        gso_size: mss,
        ipv6,
        ecn: true,
        hdr_len: start + tcp_len as u16,
        csum_start: start,
        csum_offset: 16,
    };
    with(header, &packet)
}

fn with(header: VirtioHdr, packet: &[u8]) -> Vec<u8> {
    let mut bytes = [0; virtio::LEN];
    header.encode(&mut bytes);
    [&bytes, packet].concat()
}

fn header(frame: &[u8]) -> VirtioHdr {
    let bytes = frame.first_chunk().expect("a header");
    VirtioHdr::decode(bytes).expect("a known one")
}

/// RFC 1071 word by word; 0xffff for data that contain their checksum.
fn naive(bytes: &[u8]) -> u16 {
    bytes.chunks(2).fold(0u16, |sum, pair| {
        let word = u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]);
        let (sum, carry) = sum.overflowing_add(word);
        sum + u16::from(carry)
    })
}

fn whole(segment: &Piece<'_>) -> Vec<u8> {
    [segment.headers(), segment.payload()].concat()
}

fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

proptest! {
    #[test]
    fn a_superpacket_becomes_valid_segments_in_order(
        ipv6: bool,
        payload in prop::collection::vec(any::<u8>(), 1..9000),
        mss in 1u16..3000,
    ) {
        let frame = frame(ipv6, &payload, mss.max(payload.len() as u16 / 100 + 1));
        let mss = usize::from(header(&frame).gso_size);
        let segments: Vec<_> = Segments::parse(&frame).expect("valid").collect();
        let tcp = if ipv6 { 40 } else { 20 };
        prop_assert_eq!(segments.len(), payload.len().div_ceil(mss));
        let mut restored = Vec::new();
        for (index, segment) in segments.iter().enumerate() {
            let packet = whole(segment);
            let transport = &packet[tcp..];
            let pseudo = if ipv6 {
                prop_assert_eq!(usize::from(word(&packet, 4)), transport.len());
                [&packet[8..40], &[0, 0], &(transport.len() as u16).to_be_bytes(), &[0, TCP]]
                    .concat()
            } else {
                prop_assert_eq!(usize::from(word(&packet, 2)), packet.len());
                prop_assert_eq!(naive(&packet[..20]), 0xffff);
                [&packet[12..20], &[0, TCP], &(transport.len() as u16).to_be_bytes()].concat()
            };
            prop_assert_eq!(naive(&[&pseudo, transport].concat()), 0xffff);

            let sequence = u32::from_be_bytes(transport[4..8].try_into().expect("four bytes"));
            prop_assert_eq!(sequence, 0xffff_ff00u32.wrapping_add(restored.len() as u32));
            let (first, last) = (index == 0, index + 1 == segments.len());
            let dropped = if first { 0 } else { flags::CWR }
                | if last { 0 } else { flags::FIN | flags::PSH };
            prop_assert_eq!(transport[13], ALL_FLAGS & !(dropped as u8));
            prop_assert!(segment.payload().len() == mss || last);
            restored.extend_from_slice(segment.payload());
        }
        prop_assert_eq!(restored, payload);
    }

    #[test]
    fn no_frame_makes_it_panic(
        header in prop::array::uniform10(any::<u8>()),
        mut packet in prop::collection::vec(any::<u8>(), 0..200),
        version in prop::sample::select(vec![0x45u8, 0x46, 0x4f, 0x60, 0x00]),
    ) {
        if let Some(first) = packet.first_mut() {
            *first = version;
        }
        let frame = [&header[..], &packet].concat();
        if let Ok(segments) = Segments::parse(&frame) {
            prop_assert!(segments.count() >= 1);
        }
    }

    #[test]
    fn a_partial_checksum_is_completed(ipv6: bool, payload in prop::collection::vec(any::<u8>(), 0..200)) {
        let complete: Vec<_> = Segments::parse(&frame(ipv6, &payload, 1000)).into_iter().flatten().map(|s| whole(&s)).collect();
        let frame = frame(ipv6, &payload, 0);
        let segments: Vec<_> = Segments::parse(&frame).expect("valid").map(|s| whole(&s)).collect();
        prop_assert_eq!(segments.len(), 1);
        // A superpacket has data.
        prop_assert!(complete == segments || payload.is_empty());
        let tcp = usize::from(header(&frame).csum_start);
        let mut checked = frame[virtio::LEN..].to_vec();
        checked[tcp + 16..tcp + 18].copy_from_slice(&segments[0][tcp + 16..tcp + 18]);
        checked[10..12].copy_from_slice(&segments[0][10..12]);
        prop_assert_eq!(&segments[0], &checked);
    }
}

#[test]
fn a_complete_packet_passes_unchanged() {
    let packet = [0x45, 1, 2, 3, 4];
    let frame = with(VirtioHdr::default(), &packet);
    let segments: Vec<_> = Segments::parse(&frame).expect("valid").collect();
    assert_eq!(segments.len(), 1);
    assert_eq!(whole(&segments[0]), packet);
}

#[test]
fn frames_that_contradict_their_header_are_refused() {
    let good = frame(false, &[7; 3000], 1000);
    assert!(Segments::parse(&good).is_ok());
    let altered = |change: fn(&mut VirtioHdr)| {
        let mut header = header(&good);
        change(&mut header);
        with(header, &good[virtio::LEN..])
    };
    for bad in [
        altered(|header| header.csum_start = 10),
        altered(|header| header.csum_start = 60_000),
        altered(|header| header.csum_offset = 6),
        frame(false, &[], 1000),
        good[..virtio::LEN + 20 + 32].to_vec(),
        good[..virtio::LEN].to_vec(),
        good[..3].to_vec(),
    ] {
        assert_eq!(Segments::parse(&bad).err(), Some(Malformed));
    }
}
