//! Load that measures paths.

use super::*;

/// Two links that differ in rate and delay.
const UNLIKE: [Lane; 2] = [
    Lane {
        rate: 40 * MBIT,
        delay: Duration::from_millis(10),
        burst: Duration::ZERO,
    },
    Lane {
        rate: 20 * MBIT,
        delay: Duration::from_millis(30),
        burst: Duration::ZERO,
    },
];
const RUN: u64 = 7;

impl Site {
    /// Ids of the paths over these links.
    fn ids(&self, links: &[usize]) -> Vec<u8> {
        let paths = self.nodes[0].paths().into_iter();
        let wanted = paths.filter(|path| links.contains(&path.local));
        wanted.map(|path| path.id).collect()
    }

    /// Lets a host put load on links for so long, asked for again each 200 ms.
    fn load(&mut self, host: usize, links: &[usize], span: Duration) {
        let (ids, end) = (self.ids(links), self.now + span);
        while self.now < end {
            assert!(self.nodes[host].measure(self.now, 0, RUN, &ids));
            self.run(200 * MS);
        }
    }

    /// Bytes by all paths that arrived at the other host, as the sender knows, and that a host received.
    fn counts(&self, host: usize) -> [u64; 2] {
        let paths = [host, 1 - host].map(|host| self.nodes[host].paths());
        [
            paths[0].iter().map(|path| path.stats.bytes_acked).sum(),
            paths[1].iter().map(|path| path.bytes_received).sum(),
        ]
    }

    /// Parts of the links' rate that load by a host shows at both ends after a second, and the round trip meanwhile
    /// beyond that of the last of them.
    fn measured(&mut self, host: usize, links: &[usize]) -> ([f64; 2], Duration) {
        self.load(host, links, 1000 * MS);
        let (before, span) = (self.counts(host), 2000 * MS);
        self.load(host, links, span);
        let now = self.counts(host);
        let paths = self.nodes[host].paths();
        let last = links[links.len() - 1];
        let path = paths.iter().find(|path| path.local == last).unwrap();
        let queue = path.stats.srtt - 2 * self.lanes[last].delay;
        assert!(self.nodes[host].measure(self.now, 0, RUN, &[]));
        let rate: u64 = links.iter().map(|link| self.lanes[*link].rate / 8).sum();
        let full = rate as f64 * span.as_secs_f64();
        ([0, 1].map(|of| (now[of] - before[of]) as f64 / full), queue)
    }
}

#[test]
fn load_shows_what_each_path_carries_and_their_sum_in_both_directions() {
    let mut site = Site::new(&UNLIKE);
    for host in [0, 1] {
        for links in [&[0][..], &[1], &[0, 1]] {
            let (parts, queue) = site.measured(host, links);
            for part in parts {
                // 1472 bytes in 1514.
                assert!(
                    (0.93..0.98).contains(&part),
                    "{host} {links:?}: {parts:.3?}"
                );
            }
            assert!(queue < 50 * MS, "{host} {links:?}: {queue:?}");
            site.run(1000 * MS);
        }
    }
}

#[test]
fn load_ends_when_nobody_asks_for_it_any_more_and_at_once_when_told() {
    let mut site = Site::new(&UNLIKE);
    for (pause, told) in [(2200 * MS, false), (200 * MS, true)] {
        site.load(0, &[0, 1], 1000 * MS);
        if told {
            assert!(site.nodes[0].measure(site.now, 0, RUN, &[]));
        }
        site.run(pause);
        let in_flight = |site: &Site| -> Vec<u64> {
            let paths = site.nodes[0].paths();
            paths.iter().map(|path| path.stats.in_flight).collect()
        };
        assert_eq!(in_flight(&site), [0, 0], "told: {told}");
        let before = site.by_link.clone();
        site.run(500 * MS);
        let after = site.by_link.iter().zip(&before).map(|(a, b)| a - b);
        assert!(after.clone().all(|more| more < 500), "{after:?}");
    }
}

#[test]
fn one_measurement_is_served_at_a_time() {
    let mut site = Site::new(&UNLIKE);
    let ids = site.ids(&[0]);
    site.load(0, &[0], 200 * MS);
    let now = site.now;
    for paths in [&ids[..], &[]] {
        assert!(!site.nodes[0].measure(now, 0, RUN + 1, paths));
    }
    let before = site.by_link[0];
    site.run(500 * MS);
    assert!(site.by_link[0] - before > 1_000_000, "the first goes on");
    assert!(site.nodes[0].measure(site.now, 0, RUN, &[]));
    assert!(site.nodes[0].measure(site.now, 0, RUN + 1, &ids));
    // Its user went away.
    site.run(2100 * MS);
    assert!(site.nodes[0].measure(site.now, 0, RUN, &ids));
}

#[test]
fn connections_go_before_load() {
    // A sender with less under way than the links take, and one with more.
    for window in [160_000, 1_200_000] {
        let delivered = |loaded: bool| {
            let mut site = Site::new(&UNLIKE);
            site.window = window;
            site.run(1000 * MS);
            let before = site.delivered;
            match loaded {
                true => site.load(0, &[0, 1], 2000 * MS),
                false => site.run(2000 * MS),
            }
            site.delivered - before
        };
        let (alone, beside) = (delivered(false), delivered(true));
        let part = beside as f64 / alone as f64;
        assert!(part > 0.9, "{window}: {part:.3} of {alone}");
    }
}
