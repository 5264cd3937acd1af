//! What the benchmarks share.

pub mod block_cipher;

use std::net::IpAddr;
use std::time::Duration;

use criterion::{BenchmarkGroup, Criterion, Throughput, measurement::WallTime};
use dibs_wire::emit::Headers;
use dibs_wire::packet::{IpMeta, flags};
use dibs_wire::{FlowKey, SeqNumber};

/// The message of the papers' Table II, in bytes.
pub const MESSAGE: usize = 1280;

/// The sizes of the groups of the `codec` benchmark, in bytes: one message, and one superpacket of
/// the TUN device.
pub const SIZES: [(&str, usize); 2] = [("1280B", MESSAGE), ("64KiB", 64 << 10)];

/// The group for one message there and back, as in the papers' Table II.
pub const BOTH_WAYS: &str = "1280B-both-ways";

/// Bytes of a superpacket's payload.
pub const PAYLOAD: usize = 64 * 1024 - 512;

/// A group of benchmarks.
pub type Group<'a> = BenchmarkGroup<'a, WallTime>;

/// The settings of the `codec` benchmark, overridden by the arguments of the process.
pub fn criterion() -> Criterion {
    Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .sample_size(50)
        .configure_from_args()
}

/// A group whose benchmarks process `len` bytes an iteration.
pub fn group<'a>(criterion: &'a mut Criterion, name: &str, len: usize) -> Group<'a> {
    let mut group = criterion.benchmark_group(name);
    group.throughput(Throughput::Bytes(len as u64));
    group
}

/// A message of `len` bytes in which no byte is like its neighbour.
pub fn message(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 167 + (i >> 8)) as u8).collect()
}

/// The headers of a superpacket from the first of these addresses to the second.
pub fn headers([src, dst]: [IpAddr; 2]) -> Headers<'static> {
    Headers {
        tuple: FlowKey::tcp((src, 40_000), (dst, 80)),
        meta: IpMeta {
            tos: 0,
            ttl: 64,
            flow_label: 0,
        },
        seq: SeqNumber::new(1),
        ack: SeqNumber::new(5),
        flags: flags::ACK,
        window: 1000,
        urgent: 0,
        timestamps: Some((1, 1)),
        options: None,
    }
}

/// Measures a routine; what it returns is computed.
pub fn bench<T>(group: &mut Group<'_>, name: &str, mut routine: impl FnMut() -> T) {
    group.bench_function(name, |b| b.iter(&mut routine));
}
