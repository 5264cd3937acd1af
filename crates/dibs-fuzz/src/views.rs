//! Views of packets, what is emitted from them, and cutting superpackets in software.

use dibs_wire::Packet;
use dibs_wire::checksum::{fold, pseudo_header, sum};
use dibs_wire::emit::{Headers, complete_checksum};
use dibs_wire::packet::{self, Segment, TCP, flags};
use dibs_wire::segment::Segments;
use dibs_wire::virtio::{self, VirtioHdr};

use crate::input::Input;

/// What cutting a frame of ours gives is what it stands for: TCP segments in order, none longer than
/// said, with complete checksums, that together have the payload.
pub(crate) fn check_segmentation(header: &VirtioHdr, frame: &[u8]) {
    let packet = &frame[virtio::LEN..];
    let Ok(Packet::Tcp(whole)) = packet::parse(packet) else {
        return;
    };
    if !header.needs_csum {
        assert_eq!(
            header.gso_size, 0,
            "superpackets leave the sum to the kernel"
        );
        return;
    }
    let start = usize::from(header.csum_start);
    assert_eq!(start, if whole.tuple.src.is_ipv4() { 20 } else { 40 });
    assert_eq!(header.csum_offset, 16);
    assert_eq!(usize::from(header.hdr_len), whole.payload_at);
    let most = match header.gso_size {
        0 => whole.payload.len(),
        size => {
            assert_eq!(header.ipv6, whole.tuple.src.is_ipv6());
            assert!(whole.payload.len() > usize::from(size));
            usize::from(size)
        }
    };
    let mut at = 0;
    for piece in Segments::parse(frame).expect("what we emit can be cut") {
        let bytes = [piece.headers(), piece.payload()].concat();
        let Ok(Packet::Tcp(segment)) = packet::parse(&bytes) else {
            panic!("a piece of a segment is a segment");
        };
        let end = at + segment.payload.len();
        assert!(segment.payload.len() <= most);
        assert_eq!(segment.payload, &whole.payload[at..end]);
        assert_eq!(segment.tuple, whole.tuple);
        assert_eq!(segment.seq, whole.seq.add(at as u32));
        assert_eq!(segment.options, whole.options);
        let (first, last) = (at == 0, end == whole.payload.len());
        let left_out =
            if last { 0 } else { flags::FIN | flags::PSH } | if first { 0 } else { flags::CWR };
        assert_eq!(segment.flags, whole.flags & !left_out);
        check_sums(&bytes, &segment, start);
        at = end;
    }
    assert_eq!(at, whole.payload.len(), "the pieces are the whole");
}

/// The checksums of a packet that leaves the host.
fn check_sums(bytes: &[u8], segment: &Segment<'_>, tcp_at: usize) {
    if tcp_at == 20 {
        assert_eq!(fold(sum(&bytes[..20])), 0xffff, "IPv4 header checksum");
    }
    let tcp = &bytes[tcp_at..];
    let pseudo = pseudo_header(segment.tuple.src, segment.tuple.dst, TCP, tcp.len());
    assert_eq!(fold(pseudo + sum(tcp)), 0xffff, "TCP checksum");
}

/// The packet of a TUN frame cut to its own length, with its transport checksum complete; none for
/// what is no packet, or stands for several.
pub(crate) fn whole_packet(frame: &[u8]) -> Option<Vec<u8>> {
    let (header, packet) = frame.split_first_chunk::<{ virtio::LEN }>()?;
    let header = VirtioHdr::decode(header).ok()?;
    let mut packet = packet[..packet::parse(packet).ok()?.own_len()].to_vec();
    let complete =
        header.gso_size == 0 && (!header.needs_csum || complete_checksum(&header, &mut packet));
    complete.then_some(packet)
}

/// A frame as a TUN might hand it over: parsed, emitted again, and cut.
pub(crate) fn frame(input: &mut Input<'_>) {
    let gso_size = input.u16();
    let frame = input.rest();
    // Whatever the header says, cutting is safe.
    if let Ok(segments) = Segments::parse(frame) {
        let bytes: usize = segments
            .map(|s| s.headers().len() + s.payload().len())
            .sum();
        // At least one byte of payload a segment, behind at most 256 bytes of headers.
        assert!(bytes <= frame.len() * 257);
    }
    let _ = whole_packet(frame);
    let Some((header, packet)) = frame.split_first_chunk::<{ virtio::LEN }>() else {
        return;
    };
    if let Ok(decoded) = VirtioHdr::decode(header) {
        let mut again = [0; virtio::LEN];
        decoded.encode(&mut again);
        // A size of zero says that there is no kind.
        let ipv6 = decoded.ipv6 && decoded.gso_size != 0;
        assert_eq!(VirtioHdr::decode(&again), Ok(VirtioHdr { ipv6, ..decoded }));
    }
    match packet::parse(packet) {
        Ok(Packet::Tcp(segment)) => emit_again(&segment, gso_size),
        Ok(Packet::Opaque(opaque)) => assert!(opaque.bytes.len() <= packet.len()),
        Err(_) => {}
    }
}

fn emit_again(segment: &Segment<'_>, gso_size: u16) {
    assert_eq!(segment.options.len() % 4, 0);
    let headers = Headers::from(segment);
    let len = headers.encoded_len();
    let gso_size = if usize::from(gso_size) < segment.payload.len() {
        gso_size
    } else {
        0
    };
    let mut frame = vec![0; len];
    headers.write(&mut frame, segment.payload.len(), gso_size);
    frame.extend_from_slice(segment.payload);
    let Ok(Packet::Tcp(again)) = packet::parse(&frame[virtio::LEN..]) else {
        panic!("what was a segment is one again");
    };
    assert_eq!(again, *segment);
    let header = frame.first_chunk().expect("it was just written");
    let header = VirtioHdr::decode(header).expect("it was just written");
    check_segmentation(&header, &frame);
}
