//! Where demo and benchmark take place: two hosts, a trusted link and one or two untrusted ones.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use anyhow::Result;
use dibs_netns::Host;

use crate::dibs::{PathSpec, Trust};
use crate::lab::Lab;
use crate::link::{Link, LinkSpec};

/// The trusted link's interface at both ends.
pub const TRUSTED: &str = "eth0";
/// The untrusted link's interface at both ends.
pub const UNTRUSTED: &str = "wlan0";
/// The interfaces of a site, the trusted one first.
pub const INTERFACES: [&str; 3] = [TRUSTED, UNTRUSTED, "lte0"];

/// Two hosts, joined two or three times: `eth0`, 10.0.1.1 and 10.0.1.2, is trusted, `wlan0`, 10.0.2.1
/// and 10.0.2.2, and `lte0`, 10.0.3.1 and 10.0.3.2, are not.
#[derive(Debug)]
pub struct Site {
    /// The first host.
    pub a: Host,
    /// The second.
    pub b: Host,
    /// The trusted link and the untrusted ones.
    pub links: Vec<Link>,
}

impl Site {
    /// Hosts of these names, and as many links, those that `shape` makes of each interface's plain one.
    ///
    /// # Errors
    /// As [`Lab::host`] and [`Lab::link`].
    pub fn new(
        lab: &mut Lab,
        names: [&str; 2],
        links: usize,
        shape: impl Fn(&str, LinkSpec) -> LinkSpec,
    ) -> Result<Self> {
        let (a, b) = (lab.host(names[0])?, lab.host(names[1])?);
        let mut link = |number: usize| {
            let interface = INTERFACES[number];
            let [near, far] = addresses(number).map(|address| format!("{address}/24"));
            let spec = LinkSpec::new(&a, interface, &near, &b, interface, &far);
            lab.link(shape(interface, spec))
        };
        let links = (0..links).map(&mut link).collect::<Result<_>>()?;
        Ok(Self { a, b, links })
    }

    /// Bytes that the first host has sent by each link, headers and all.
    ///
    /// # Errors
    /// If an interface is gone.
    pub fn sent(&self) -> Result<Vec<u64>> {
        let interfaces = INTERFACES[..self.links.len()].iter();
        let sent = interfaces.map(|interface| Ok(self.a.counters(interface)?.tx_bytes));
        sent.collect()
    }

    /// So many links as paths: `eth`, `wlan`, `lte`.
    pub fn paths(links: usize) -> Vec<PathSpec> {
        let path = |name, number: usize, trust| PathSpec {
            name,
            interface: INTERFACES[number],
            trust,
            ends: addresses(number),
        };
        let mut paths = vec![
            path("eth", 0, Trust::Trusted),
            path("wlan", 1, Trust::Untrusted),
            path("lte", 2, Trust::Untrusted),
        ];
        paths.truncate(links);
        paths
    }
}

/// The addresses of a link's two ends, by its place in [`INTERFACES`].
pub fn addresses(link: usize) -> [IpAddr; 2] {
    [1, 2].map(|end| Ipv4Addr::new(10, 0, link as u8 + 1, end).into())
}

/// Sampler of what the first host of a site sends by each link, interval by interval.
#[derive(Debug)]
pub struct Sampler<'a> {
    site: &'a Site,
    start: Instant,
    every: Duration,
    before: Vec<u64>,
    /// Bytes by link and interval, headers and all.
    pub bytes: Vec<Vec<u64>>,
}

impl<'a> Sampler<'a> {
    /// For intervals of this length, the first of which begins now.
    ///
    /// # Errors
    /// As [`Site::sent`].
    pub fn new(site: &'a Site, every: Duration) -> Result<Self> {
        Ok(Self {
            site,
            start: Instant::now(),
            every,
            before: site.sent()?,
            bytes: vec![Vec::new(); site.links.len()],
        })
    }

    /// How many intervals have passed.
    pub fn count(&self) -> usize {
        self.bytes[0].len()
    }

    /// Waits for an interval's end, again and again until so much time has passed since the start; `each` is told of
    /// that time after each.
    ///
    /// # Errors
    /// As [`Site::sent`], or those of `each`.
    pub fn until(
        &mut self,
        end: Duration,
        mut each: impl FnMut(Duration) -> Result<()>,
    ) -> Result<()> {
        while self.start.elapsed() < end {
            let next = self.start + self.every * (self.count() as u32 + 1);
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            let now = self.site.sent()?;
            for (link, bytes) in self.bytes.iter_mut().enumerate() {
                bytes.push(now[link] - self.before[link]);
            }
            self.before = now;
            each(self.start.elapsed())?;
        }
        Ok(())
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }
}
