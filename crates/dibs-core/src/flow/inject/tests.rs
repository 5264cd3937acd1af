use dibs_wire::packet::{self, Packet};
use dibs_wire::virtio::VirtioHdr;

use super::*;

fn template() -> Template {
    Template {
        bump: crate::bump::SCRAMBLE,
        tuple: FlowKey::tcp(
            ([0xfd00, 0, 0, 0, 0, 0, 0, 1], 1),
            ([0xfd00, 0, 0, 0, 0, 0, 0, 2], 2),
        ),
        meta: IpMeta {
            tos: 0,
            ttl: 64,
            flow_label: 5,
        },
    }
}

fn tcp(bits: u16, tsval: u32) -> TcpFields<'static> {
    TcpFields {
        flags: flags::ACK | bits,
        window: 9,
        ack: SeqNumber::new(3),
        timestamps: Some((tsval, 1)),
        meta: None,
        options: None,
        urgent: None,
    }
}

struct Bench {
    injector: Injector,
    pool: Pool,
    floor: TsvalFloor,
}

impl Bench {
    fn new() -> Self {
        Self {
            injector: Injector::default(),
            pool: Pool::new(4),
            floor: TsvalFloor::default(),
        }
    }

    fn add(&mut self, owner: u64, seq: u32, bits: u16, tsval: u32, payload: &[u8]) {
        let room = self.injector.room(
            &mut self.pool,
            owner,
            template(),
            SeqNumber::new(seq),
            &tcp(bits, tsval),
            &mut self.floor,
            payload.len(),
        );
        room.copy_from_slice(payload);
    }

    /// (sequence number, payload, flags, GSO size, TSval) of each packet.
    fn out(&mut self) -> Vec<(u32, Vec<u8>, u16, u16, u32)> {
        self.injector.flush();
        let mut out = Vec::new();
        while let Some(injection) = self.injector.pop() {
            let (header, bytes) = injection.frame().split_first_chunk().unwrap();
            let header = VirtioHdr::decode(header).unwrap();
            let Ok(Packet::Tcp(s)) = packet::parse(bytes) else {
                panic!("not a segment")
            };
            assert_eq!(usize::from(header.hdr_len), s.payload_at);
            assert!(header.needs_csum && header.ipv6 == (header.gso_size > 0));
            let tsval = s.timestamps.unwrap().0;
            out.push((
                s.seq.raw(),
                s.payload.to_vec(),
                s.flags,
                header.gso_size,
                tsval,
            ));
            Injector::recycle(&mut self.pool, injection);
        }
        out
    }
}

#[test]
fn pieces_that_follow_each_other_become_one_superpacket() {
    let mut b = Bench::new();
    b.add(1, 10, 0, 5, &[1; 100]);
    b.add(1, 110, 0, 5, &[2; 100]);
    b.add(1, 210, flags::PSH, 5, &[3; 40]);
    b.add(1, 250, 0, 5, &[4; 100]);
    let out = b.out();
    assert_eq!(out.len(), 2);
    assert_eq!((out[0].0, out[0].1.len(), out[0].3), (10, 240, 100));
    assert_eq!(out[0].2 & flags::PSH, flags::PSH);
    assert_eq!((out[1].0, out[1].3, out[1].2 & flags::PSH), (250, 0, 0));
}

#[test]
fn what_differs_does_not_join() {
    let mut b = Bench::new();
    b.add(1, 10, 0, 5, &[1; 100]);
    b.add(1, 110, 0, 6, &[1; 100]); // another TSval
    b.add(2, 210, 0, 6, &[1; 100]); // another connection
    b.add(2, 311, 0, 6, &[1; 100]); // a gap
    b.add(2, 411, 0, 6, &[1; 101]); // longer than the first
    assert_eq!(b.out().len(), 5);
}

#[test]
fn tsval_never_goes_back() {
    let mut b = Bench::new();
    b.add(1, 10, 0, 9, &[1; 10]);
    b.add(1, 20, 0, 5, &[1; 10]);
    let vals: Vec<u32> = b.out().iter().map(|o| o.4).collect();
    assert!(vals.iter().all(|v| *v == 9), "{vals:?}");
    assert!(b.floor.admits(9) && !b.floor.admits(8));
}

#[test]
fn a_piece_taken_back_leaves_no_trace() {
    let mut b = Bench::new();
    b.add(1, 10, 0, 5, &[1; 100]);
    b.add(1, 110, flags::FIN, 5, &[2; 100]);
    b.injector.retract(&mut b.pool);
    b.add(1, 110, 0, 5, &[3; 100]);
    b.injector.retract(&mut b.pool);
    let out = b.out();
    assert_eq!(out.len(), 1);
    assert_eq!((out[0].1.clone(), out[0].2 & flags::FIN), (vec![1; 100], 0));
}

#[test]
fn a_superpacket_stays_within_an_ip_packet() {
    let mut b = Bench::new();
    for i in 0..100u32 {
        b.add(1, i * 1400, 0, 5, &[7; 1400]);
    }
    let out = b.out();
    assert!(out.len() == 3, "{}", out.len());
    assert_eq!(out.iter().map(|o| o.1.len()).sum::<usize>(), 140_000);
}

#[test]
fn empty_segments_keep_their_place() {
    let mut b = Bench::new();
    b.add(1, 10, 0, 5, &[1; 10]);
    let fields = tcp(0, 4);
    b.injector.empty_segment(
        &mut b.pool,
        template(),
        SeqNumber::new(1),
        &fields,
        &mut b.floor,
    );
    b.add(1, 20, 0, 5, &[1; 10]);
    let out = b.out();
    assert_eq!(
        out.iter().map(|o| o.1.len()).collect::<Vec<_>>(),
        [10, 0, 10]
    );
    assert_eq!(out[1].4, 5, "the floor holds for it too");
}
