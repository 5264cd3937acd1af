//! One stream over links that differ, with a kernel that keeps so much under way and no more.

use std::collections::BTreeMap;

use super::*;

mod load;

const MS: Duration = Duration::from_millis(1);
const MBIT: u64 = 1_000_000;
const GBIT: u64 = 1000 * MBIT;
/// What a kernel hands over at once.
const SUPERPACKET: usize = 60_000;

/// One link, both ways.
#[derive(Clone, Copy, Debug)]
struct Lane {
    /// Bits a second.
    rate: u64,
    delay: Duration,
    /// Unused time that it makes up for at once, as a token bucket does.
    burst: Duration,
}

enum Event {
    Arrives {
        to: usize,
        path: usize,
        bytes: Vec<u8>,
    },
    /// The far kernel has so much, says its answer, which travels by the first link.
    Acknowledged(u32),
}

/// Two nodes with links of which the first is trusted, and the kernel of the first.
struct Site {
    now: Time,
    nodes: [Node; 2],
    lanes: Vec<Lane>,
    /// When each link will have sent what it was given, by host.
    free_at: [Vec<Time>; 2],
    events: BTreeMap<(Time, u64), Event>,
    order: u64,
    window: u32,
    sent: u32,
    acknowledged: u32,
    delivered: u64,
    by_link: Vec<u64>,
}

impl Site {
    fn new(lanes: &[Lane]) -> Self {
        let config = |host: usize| {
            let mut config = config(host, Integrity::On);
            let link = |number| LocalPath {
                trusted: number == 0,
                mtu: 1500,
                up: true,
                usage: Usage::default(),
                addresses: vec![addr(host, number).ip()],
                public: Vec::new(),
            };
            config.paths = (0..lanes.len()).map(link).collect();
            if host == 0 {
                let to = |path| (path, addr(1, path));
                config.peers[0].endpoints = (0..lanes.len()).map(to).collect();
            }
            config
        };
        let node = |host: usize| Node::new(Time::ZERO, config(host), [host as u8 + 3; 32]).unwrap();
        let now = Time::ZERO + Duration::from_secs(1);
        let mut site = Self {
            now,
            nodes: [node(0), node(1)],
            lanes: lanes.to_vec(),
            free_at: [vec![now; lanes.len()], vec![now; lanes.len()]],
            events: BTreeMap::new(),
            order: 0,
            window: 0,
            sent: 1,
            acknowledged: 1,
            delivered: 0,
            by_link: vec![0; lanes.len()],
        };
        site.run(Duration::from_secs(3));
        for node in &site.nodes {
            let paths = node.paths();
            assert!(paths.len() == lanes.len(), "{paths:?}");
            assert!(paths.iter().all(|p| p.state == "active"), "{paths:?}");
        }
        site
    }

    fn at(&mut self, time: Time, event: Event) {
        self.order += 1;
        self.events.insert((time, self.order), event);
    }

    fn outputs(&mut self) {
        for host in 0..2 {
            while let Some(t) = self.nodes[host].poll_transmit(self.now) {
                let (path, segment, bytes) = (t.path, t.segment, t.bytes.to_vec());
                for datagram in bytes.chunks(segment) {
                    self.transmit(host, path, datagram);
                }
            }
            self.nodes[host].flush_injections();
            while let Some(injection) = self.nodes[host].poll_injection() {
                if host == 1
                    && let Ok(Packet::Tcp(s)) = packet::parse(&injection.frame()[virtio::LEN..])
                {
                    self.delivered += s.payload.len() as u64;
                    let end = s.seq.raw() + s.payload.len() as u32;
                    let answer = self.now + self.lanes[0].delay;
                    self.at(answer, Event::Acknowledged(end));
                }
                self.nodes[host].recycle(injection);
            }
            while self.nodes[host].poll_event().is_some() {}
        }
    }

    fn transmit(&mut self, host: usize, path: usize, datagram: &[u8]) {
        let Lane { rate, delay, burst } = self.lanes[path];
        let free_at = &mut self.free_at[host][path];
        // It holds 50 ms.
        if free_at.since(self.now) > 50 * MS {
            return;
        }
        let on_wire = (datagram.len() + 42) as u64;
        let busy = Duration::from_nanos(on_wire * 8_000_000_000 / rate);
        *free_at = (*free_at).max(self.now - burst) + busy;
        let arrival = (*free_at).max(self.now) + delay;
        if host == 0 {
            self.by_link[path] += on_wire;
        }
        let bytes = datagram.to_vec();
        let to = 1 - host;
        self.at(arrival, Event::Arrives { to, path, bytes });
    }

    /// The kernel sends what its window lets go.
    fn fill_window(&mut self) {
        while self.sent + SUPERPACKET as u32 <= self.acknowledged + self.window {
            let headers = Headers {
                tuple: tuple(0),
                meta: IpMeta {
                    tos: 0,
                    ttl: 64,
                    flow_label: 0,
                },
                seq: SeqNumber::new(self.sent),
                ack: SeqNumber::new(5),
                flags: flags::ACK,
                window: WINDOW,
                urgent: 0,
                timestamps: Some(((self.now.as_nanos() / 1_000_000) as u32, 1)),
                options: None,
            };
            let node = &mut self.nodes[0];
            let mut buffer = node.tun_buffer();
            let at = headers.encoded_len();
            headers.write(&mut buffer[..MAX_HEADERS], SUPERPACKET, 1400);
            node.handle_tun(self.now, BUMP, buffer, at + SUPERPACKET);
            self.sent += SUPERPACKET as u32;
        }
    }

    fn run(&mut self, span: Duration) {
        let end = self.now + span;
        loop {
            self.fill_window();
            self.outputs();
            let timers = self
                .nodes
                .iter()
                .filter_map(Node::poll_timeout)
                .map(|due| due.at);
            let next = timers.chain(self.events.keys().next().map(|k| k.0)).min();
            let Some(next) = next.filter(|t| *t <= end) else {
                break;
            };
            self.now = self.now.max(next);
            while let Some(first) = self.events.first_entry()
                && first.key().0 <= self.now
            {
                match first.remove() {
                    Event::Arrives {
                        to,
                        path,
                        mut bytes,
                    } => {
                        let from = addr(1 - to, path);
                        self.nodes[to].handle_datagram(self.now, path, from, &mut bytes);
                    }
                    Event::Acknowledged(number) => {
                        self.acknowledged = self.acknowledged.max(number);
                    }
                }
            }
            for node in &mut self.nodes {
                if node.poll_timeout().is_some_and(|due| due.at <= self.now) {
                    let wall = Duration::from_secs(1_000_000) + self.now.since(Time::ZERO);
                    node.handle_timeout(self.now, wall);
                }
            }
        }
        self.now = end;
    }
}

/// Lets a kernel keep `window` under way, in time of all links together, on a connection that has come
/// from the first link in plain. What is delivered once it has gone on for `after`, as a part of all
/// rates, and what each link has of it.
fn delivered(lanes: &[Lane], window: Duration, after: Duration) -> (f64, Vec<f64>) {
    let mut site = Site::new(lanes);
    let now = site.now;
    let bytes_per_second: u64 = lanes.iter().map(|lane| lane.rate / 8).sum();
    site.nodes[0].expect_rate(now, 0, inner(1), lanes[0].rate / 8);
    site.window = (bytes_per_second as f64 * window.as_secs_f64()) as u32;
    site.run(after);
    let span = 250 * MS;
    let (before, links) = (site.delivered, site.by_link.clone());
    site.run(span);
    let part = |bytes: u64, of: u64| bytes as f64 / (of as f64 * span.as_secs_f64());
    let by_link = lanes.iter().zip(site.by_link.iter().zip(links));
    let by_link = by_link.map(|(lane, (now, before))| part(now - before, lane.rate / 8));
    let share = part(site.delivered - before, bytes_per_second);
    (share, by_link.collect())
}

/// 0.95 of what of a link's rate is payload: 1400 bytes in 1514.
const FILLED: f64 = 0.88;

#[test]
fn a_window_that_just_fills_equal_links_fills_them_all() {
    // A window of twice the round trip leaves each link a queue too short to be taken for one, and
    // less to those that are thought slow.
    let near = Lane {
        rate: GBIT,
        delay: MS / 20,
        burst: 2 * MS,
    };
    let far = Lane {
        rate: 100 * MBIT,
        delay: 2 * MS,
        burst: Duration::ZERO,
    };
    for (lane, links, windows) in [
        (near, 3, [800, 1600, 4000]),
        (near, 2, [1600, 2400, 8000]),
        (far, 2, [8000, 12_000, 24_000]),
    ] {
        for window in windows {
            let window = Duration::from_micros(window);
            let (share, by_link) = delivered(&vec![lane; links], window, 500 * MS);
            assert!(share > FILLED, "{window:?}: {share:.3}, {by_link:.2?}");
        }
    }
}

#[test]
fn a_window_that_comes_in_bursts_does_not_keep_a_path_at_its_start() {
    // In order at the far end means in bursts here: each overflowed the queue of a path that went on
    // doubling its rate.
    let lane = Lane {
        rate: 100 * MBIT,
        delay: 20 * MS,
        burst: Duration::ZERO,
    };
    for links in [2, 3] {
        let (share, by_link) = delivered(&vec![lane; links], 60 * MS, 2000 * MS);
        assert!(share > FILLED, "{share:.3}, {by_link:.2?}");
    }
}

#[test]
fn unequal_links_carry_their_sum() {
    let lane = |rate| Lane {
        rate,
        delay: MS / 20,
        burst: 2 * MS,
    };
    for lanes in [[100, 20], [20, 100]] {
        let lanes = lanes.map(|rate| lane(rate * MBIT));
        for window in [12, 24, 48] {
            let (share, by_link) = delivered(&lanes, window * MS, 500 * MS);
            assert!(share > FILLED, "{window} ms: {share:.3}, {by_link:.2?}");
        }
    }
}
