//! An emulated link: a thread that carries frames between two interfaces.
//!
//! Each host's veth has its other end in a namespace where nothing but this thread listens, on a
//! packet socket per interface. Frames come with a virtio-net header, which carries unfinished
//! checksums across.

use std::collections::BinaryHeap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use dibs_netem::{Cause, Conditions, Emulator, Fate};
use dibs_netns::Host;
use dibs_wire::checksum;
use dibs_wire::virtio::{GSO_NONE, LEN as HEADER, NEEDS_CSUM};
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::time::TimeSpec;
use nix::unistd::{Pid, pipe2};

use crate::packet_socket::{BATCH, PacketSocket, Ring};

const ETHERNET: usize = 14;
/// Bytes that one direction may hold: 1 Gbit/s for two seconds.
const MOST_HELD: usize = 256 << 20;
/// Frames kept for reuse.
const SPARE: usize = 4096;
/// Frames are late by up to this part of their delay, and by [`MOST_LATE`], so as to go in batches, as
/// interfaces that moderate their interrupts have it: one by one they take the processor that the ends need.
const PART_LATE: u32 = 100;
const MOST_LATE: Duration = Duration::from_micros(100);

/// One of a link's two ends: the first or the second host of its [`LinkSpec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The first.
    A,
    /// The second.
    B,
}

impl End {
    /// Both.
    pub const BOTH: [End; 2] = [End::A, End::B];
}

/// Fates of the packets that entered one direction of an emulated link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WireStats {
    /// Entered the link.
    pub entered: u64,
    /// Came out, duplicates included.
    pub delivered: u64,
    /// Bytes of whole frames that came out.
    pub bytes: u64,
    /// Lost by the dice.
    pub lost: u64,
    /// Dropped because the queue was full.
    pub queue_dropped: u64,
    /// Dropped because the link was out.
    pub outage_dropped: u64,
    /// Delivered twice.
    pub duplicated: u64,
    /// Held back so that others overtake.
    pub reordered: u64,
    /// Delivered with a flipped bit.
    pub corrupted: u64,
    /// Larger than the wire's packets, because someone switched an offload of the interface back
    /// on; dropped.
    pub oversized: u64,
    /// Not taken by the interface at the far end, which is down.
    pub undeliverable: u64,
    /// Missed because this machine was too slow: the run says nothing about the link.
    pub overruns: u64,
}

/// One of our processors, counted from the last, on which emulated links run. A veth hands packets to the processor that
/// sends, and what waits on one that is busy would be overtaken by what comes from another.
fn processor(number: usize) -> usize {
    let ours = sched_getaffinity(Pid::from_raw(0)).unwrap_or_default();
    let is_ours = |&n: &usize| ours.is_set(n).unwrap_or(false);
    let ours = Vec::from_iter((0..CpuSet::count()).rev().filter(is_ours));
    ours.get(number % ours.len().max(1)).copied().unwrap_or(0)
}

/// Has what comes by an interface received on this one of our processors, in the order of sending, whichever
/// processor sends (receive packet steering). It takes the host's own root: others get links that reorder.
pub(crate) fn receive_in_order(host: &Host, name: &str, number: usize) {
    let n = processor(number);
    // Groups of 32, the highest first.
    let mask = format!("{:x}{}", 1u32 << (n % 32), ",00000000".repeat(n / 32));
    let file = format!("/sys/class/net/{name}/queues/rx-0/rps_cpus");
    let line = format!("mount -t sysfs none /sys && echo {mask} > {file}");
    let _ = host.shell(&format!("unshare -m sh -c '{line}'"));
}

/// A running emulator.
#[derive(Debug)]
pub(crate) struct Wire {
    shared: Arc<Shared>,
    middle: Host,
    names: [String; 2],
    largest_mtu: u32,
    start: Instant,
    /// Closed to stop the thread.
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// The interfaces towards the ends.
    sockets: [PacketSocket; 2],
    /// By the end that packets come from.
    conditions: [Mutex<Conditions>; 2],
    stats: [Mutex<WireStats>; 2],
}

impl Wire {
    pub(crate) fn start(
        middle: &Host,
        names: [String; 2],
        mtu: u32,
        conditions: [Conditions; 2],
        seed: u64,
    ) -> Result<Self> {
        let open = |name: &str| middle.in_ns(|| PacketSocket::forward(name, mtu));
        let [(a, ring_a), (b, ring_b)] = [open(&names[0])?, open(&names[1])?];
        let largest_mtu = ring_a.largest_mtu();
        let (sockets, rings) = ([a, b], [ring_a, ring_b]);
        let shared = Arc::new(Shared {
            sockets,
            conditions: conditions.map(Mutex::new),
            stats: Default::default(),
        });
        let start = Instant::now();
        let (stopped, stop) = pipe2(OFlag::O_CLOEXEC).context("pipe")?;
        let worker = Arc::clone(&shared);
        let thread = middle.thread("link", move || {
            // It is the network, which runs before all programs. Users other than root have it run as one of them.
            let _ = dibs_io::set_niceness(0, -20);
            let mut one = CpuSet::new();
            if one.set(processor(0)).is_ok() {
                let _ = sched_setaffinity(Pid::from_raw(0), &one);
            }
            worker.carry(rings, start, seed, &stopped)
        })?;
        let (middle, stop, thread) = (middle.clone(), Some(stop), Some(thread));
        Ok(Self {
            shared,
            middle,
            names,
            largest_mtu,
            start,
            stop,
            thread,
        })
    }

    pub(crate) fn set(&self, from: End, change: impl FnOnce(&mut Conditions)) {
        change(&mut lock(&self.shared.conditions[from as usize]));
    }

    pub(crate) fn stats(&self, from: End) -> Result<WireStats> {
        let offered = self.shared.sockets[from as usize].offered()?;
        let mut stats = lock(&self.shared.stats[from as usize]);
        stats.overruns += offered.missed;
        Ok(*stats)
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    pub(crate) fn set_mtu(&self, mtu: u32) -> Result<()> {
        let largest = self.largest_mtu;
        ensure!(
            mtu <= largest,
            "this link was made for an MTU of at most {largest}"
        );
        for name in &self.names {
            self.middle
                .run(&format!("ip link set dev {name} mtu {mtu}"))?;
        }
        Ok(())
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A frame on its way.
#[derive(PartialEq, Eq)]
struct Held {
    at: Duration,
    number: u64,
    frame: Vec<u8>,
}

impl Ord for Held {
    /// The heap yields its greatest first: the earliest, then the first come.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// One direction: what the emulator decided about frames that have not come out yet.
struct Direction {
    emulator: Emulator,
    /// When the last frame came.
    entered_at: Duration,
    held: BinaryHeap<Held>,
    held_bytes: usize,
    number: u64,
    spare: Vec<Vec<u8>>,
    due: Vec<Vec<u8>>,
}

impl Shared {
    /// Carries frames until the other end of `stop` is closed.
    fn carry(&self, mut rings: [Ring; 2], start: Instant, seed: u64, stop: &OwnedFd) {
        // The default of 50 us would be added to every delay; a refusal only costs that.
        let _ = nix::sys::prctl::set_timerslack(1);
        // Neighbouring seeds must not give two links the same dice.
        let mut directions = [0, 1].map(|n| Direction::new(seed.wrapping_mul(2).wrapping_add(n)));
        loop {
            let mut received = 0;
            let pairs = rings.iter_mut().zip(&mut directions).enumerate();
            for (from, (ring, direction)) in pairs {
                received += self.receive(from, direction, ring, start);
                self.release(from, direction, start);
            }
            if received > 0 {
                continue;
            }
            let next = directions
                .iter()
                .filter_map(|direction| direction.held.peek());
            let mut wait = next
                .map(|held| held.at.saturating_sub(start.elapsed()))
                .min();
            let [a, b] = &self.sockets;
            let mut fds =
                [stop.as_fd(), a.as_fd(), b.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            let mut watched = &mut fds[..];
            let late = self.tolerance();
            if wait.is_some() && !late.is_zero() {
                // What comes meanwhile bears its time.
                wait = Some(late);
                watched = &mut watched[..1];
            }
            match ppoll(watched, wait.map(TimeSpec::from_duration), None) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(error) => panic!("ppoll on sockets of our own: {error}"),
            }
            if fds[0].revents().is_some_and(|events| !events.is_empty()) {
                return;
            }
        }
    }

    /// How late frames may be.
    fn tolerance(&self) -> Duration {
        let delays = self.conditions.each_ref().map(|c| lock(c).delay);
        let [a, b] = delays.map(|delay| delay / PART_LATE);
        a.min(b).min(MOST_LATE)
    }

    /// Takes a batch from one end and lets the emulator decide; returns how many.
    fn receive(
        &self,
        from: usize,
        direction: &mut Direction,
        ring: &mut Ring,
        start: Instant,
    ) -> usize {
        let conditions = lock(&self.conditions[from]);
        let mut stats = lock(&self.stats[from]);
        // Frames bear the time of their coming, so that our being late costs the link no rate.
        let now = start.elapsed();
        let clock = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        ring.receive(|frame| {
            let age = clock.saturating_sub(frame.at);
            direction.enter(
                &conditions,
                now.saturating_sub(age),
                frame.bytes,
                &mut stats,
            );
        })
    }

    /// Sends on what is due.
    fn release(&self, from: usize, direction: &mut Direction, start: Instant) {
        let to = &self.sockets[1 - from];
        loop {
            let now = start.elapsed();
            while direction.due.len() < BATCH
                && direction.held.peek().is_some_and(|held| held.at <= now)
            {
                let held = direction.held.pop().expect("just seen");
                direction.held_bytes -= held.frame.len();
                direction.due.push(held.frame);
            }
            if direction.due.is_empty() {
                return;
            }
            let mut stats = lock(&self.stats[from]);
            to.send(&direction.due, |frame, sent| {
                if sent {
                    stats.delivered += 1;
                    stats.bytes += (frame.len() - HEADER) as u64;
                } else {
                    stats.undeliverable += 1;
                }
            });
            direction.spare.append(&mut direction.due);
            direction.spare.truncate(SPARE);
        }
    }
}

impl Direction {
    fn new(seed: u64) -> Self {
        // One step of a mixer, so that seeds 1 and 2 share no dice in either direction.
        let seed = seed.wrapping_mul(0xd134_2543_de82_ef95).rotate_left(29);
        Self {
            emulator: Emulator::new(seed),
            entered_at: Duration::ZERO,
            held: BinaryHeap::new(),
            held_bytes: 0,
            number: 0,
            spare: Vec::new(),
            due: Vec::with_capacity(BATCH),
        }
    }

    fn enter(
        &mut self,
        conditions: &Conditions,
        now: Duration,
        frame: &[u8],
        stats: &mut WireStats,
    ) {
        stats.entered += 1;
        if frame[1] != GSO_NONE {
            stats.oversized += 1;
            return;
        }
        // The wall clock may be set back.
        self.entered_at = self.entered_at.max(now);
        let delivery = match self
            .emulator
            .enter(conditions, self.entered_at, frame.len() - HEADER)
        {
            Fate::Dropped(Cause::Outage) => return stats.outage_dropped += 1,
            Fate::Dropped(Cause::Queue) => return stats.queue_dropped += 1,
            Fate::Dropped(Cause::Loss) => return stats.lost += 1,
            Fate::Delivered(delivery) => delivery,
        };
        if self.held_bytes + frame.len() > MOST_HELD {
            stats.overruns += 1;
            return;
        }
        let mut copy = self.copy(frame);
        if let Some(random) = delivery.corrupt {
            corrupt(&mut copy, random);
            stats.corrupted += 1;
        }
        stats.reordered += u64::from(delivery.late);
        if delivery.duplicate {
            stats.duplicated += 1;
            let second = self.copy(&copy);
            self.hold(delivery.at, second);
        }
        self.hold(delivery.at, copy);
    }

    fn copy(&mut self, frame: &[u8]) -> Vec<u8> {
        let mut copy = self.spare.pop().unwrap_or_default();
        copy.clear();
        copy.extend_from_slice(frame);
        copy
    }

    fn hold(&mut self, at: Duration, frame: Vec<u8>) {
        self.held_bytes += frame.len();
        self.held.push(Held {
            at,
            number: self.number,
            frame,
        });
        self.number += 1;
    }
}

/// Flips one bit behind the link-layer header, after finishing the checksum: the receiver must be
/// able to notice.
fn corrupt(frame: &mut [u8], random: u64) {
    if frame.len() <= HEADER + ETHERNET {
        return;
    }
    let (header, packet) = frame.split_at_mut(HEADER);
    if header[0] & NEEDS_CSUM != 0 {
        let field = |at: usize| usize::from(u16::from_ne_bytes([header[at], header[at + 1]]));
        finish_checksum(packet, field(6), field(8));
    }
    header.fill(0);
    let bits = (packet.len() - ETHERNET) as u64 * 8;
    let bit = (random % bits) as usize;
    packet[ETHERNET + bit / 8] ^= 1 << (bit % 8);
}

/// Replaces the pseudo-header's sum at `start + offset` by the checksum of all from `start` on.
fn finish_checksum(packet: &mut [u8], start: usize, offset: usize) {
    let Some(covered) = packet
        .get(start..)
        .filter(|covered| covered.len() >= offset + 2)
    else {
        return;
    };
    // UDP reads 0 as "no checksum"; for TCP the two are the same number.
    let checksum = match !checksum::fold(checksum::sum(covered)) {
        0 => 0xffff,
        checksum => checksum,
    };
    packet[start + offset..][..2].copy_from_slice(&checksum.to_be_bytes());
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no holder of this lock panics")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A UDP datagram whose checksum field holds the pseudo-header's sum, as the kernel leaves it.
    fn unfinished() -> Vec<u8> {
        let mut frame = vec![NEEDS_CSUM, 0, 0, 0, 0, 0];
        frame.extend_from_slice(&34u16.to_ne_bytes());
        frame.extend_from_slice(&6u16.to_ne_bytes());
        frame.extend_from_slice(&[0; ETHERNET + 20]);
        // 10.0.0.1 -> 10.0.0.2, protocol 17, length 12: pseudo-header sum 0x1420.
        frame.extend_from_slice(&[0, 1, 0, 2, 0, 12, 0x14, 0x20, b'd', b'i', b'b', b's']);
        frame
    }

    #[test]
    fn the_checksum_is_finished_before_a_bit_flips() {
        let mut finished = unfinished();
        finish_checksum(&mut finished[HEADER..], 34, 6);
        // 0x1420 + 1 + 2 + 12 + 0x6469 + 0x6273 = 0xdb0b, the complement of which is 0x24f4.
        assert_eq!(finished[HEADER + 40..HEADER + 42], [0x24, 0xf4]);

        let mut corrupted = unfinished();
        corrupt(&mut corrupted, 12_345);
        assert_eq!(corrupted[..HEADER], [0; HEADER]);
        let differing: u32 = finished[HEADER..]
            .iter()
            .zip(&corrupted[HEADER..])
            .map(|(a, b)| (a ^ b).count_ones())
            .sum();
        assert_eq!(differing, 1);
        assert_eq!(
            finished[HEADER..][..ETHERNET],
            corrupted[HEADER..][..ETHERNET]
        );
    }

    #[test]
    fn frames_come_out_by_time_and_then_in_order() {
        let mut direction = Direction::new(1);
        for (at, name) in [(2, b'c'), (1, b'a'), (1, b'b')] {
            direction.hold(Duration::from_millis(at), vec![name]);
        }
        let order: Vec<u8> = std::iter::from_fn(|| direction.held.pop())
            .map(|held| held.frame[0])
            .collect();
        assert_eq!(order, b"abc");
    }

    /// Bytes that leave at 1 Gbit/s take 8 ns each, the delay comes on top, and what enters meanwhile waits its turn.
    #[test]
    fn frames_leave_at_the_rate_and_arrive_after_the_delay_in_their_order() {
        let delay = Duration::from_millis(5);
        let conditions = Conditions::new().rate(1_000_000_000).delay(delay);
        let mut direction = Direction::new(1);
        let mut stats = WireStats::default();
        let [large, small] = [1514, 60].map(|len| vec![0; HEADER + len]);
        for frame in [&large, &small, &large] {
            direction.enter(&conditions, Duration::ZERO, frame, &mut stats);
        }
        // Long after the others have left.
        let later = Duration::from_secs(1);
        direction.enter(&conditions, later, &large, &mut stats);
        let at = |bytes: u64| delay + Duration::from_nanos(8 * bytes);
        let expected = [
            (at(1514), &large),
            (at(1514 + 60), &small),
            (at(2 * 1514 + 60), &large),
            (later + at(1514), &large),
        ];
        for (at, frame) in expected {
            let held = direction.held.pop().expect("all of them pass");
            assert_eq!((held.at, held.frame.len()), (at, frame.len()));
        }
        assert_eq!(stats.entered, 4);
    }

    #[test]
    fn superpackets_are_refused_and_counted() {
        let mut direction = Direction::new(1);
        let mut frame = unfinished();
        frame[1] = 1;
        let mut stats = WireStats::default();
        direction.enter(&Conditions::new(), Duration::ZERO, &frame, &mut stats);
        assert_eq!(
            stats,
            WireStats {
                entered: 1,
                oversized: 1,
                ..WireStats::default()
            }
        );
    }
}
