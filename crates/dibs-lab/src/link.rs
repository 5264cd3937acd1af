//! Links between two hosts: plain veth, rate-limited by the kernel, or emulated.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dibs_netem::Conditions;
use dibs_netns::{HANG, Host, veth, wait_until};

use crate::emulated_link::{self, End, Wire, WireStats};

/// Properties that a link is to have.
#[derive(Clone, Debug)]
pub struct LinkSpec {
    ends: [(Host, String, String); 2],
    mtu: u32,
    seed: u64,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Plain,
    Shaped(u64),
    Emulated(Box<[Conditions; 2]>),
}

impl LinkSpec {
    /// A plain veth pair between `interface_a` of host `a` and `interface_b` of host `b`. Addresses
    /// are given with their prefix lengths, none to several, separated by spaces:
    /// `"10.0.1.1/24 fd01::1/64"`.
    pub fn new(
        a: &Host,
        interface_a: &str,
        addresses_a: &str,
        b: &Host,
        interface_b: &str,
        addresses_b: &str,
    ) -> Self {
        let end = |host: &Host, interface: &str, addresses: &str| {
            (host.clone(), interface.to_owned(), addresses.to_owned())
        };
        Self {
            ends: [
                end(a, interface_a, addresses_a),
                end(b, interface_b, addresses_b),
            ],
            mtu: 1500,
            seed: 1,
            kind: Kind::Plain,
        }
    }

    /// The MTU of both ends; 1500 if not set.
    pub fn mtu(mut self, mtu: u32) -> Self {
        self.mtu = mtu;
        self
    }

    /// Limits each direction to so many bits per second with the kernel's token bucket filter. It
    /// costs next to nothing, and does nothing else.
    pub fn shaped(mut self, bits_per_second: u64) -> Self {
        self.kind = Kind::Shaped(bits_per_second);
        self
    }

    /// Emulates both directions. The ends then hand over wire-size packets only, and each meets
    /// its own fate.
    pub fn emulated(self, both: Conditions) -> Self {
        self.emulated_each(both.clone(), both)
    }

    /// Emulates each direction with conditions of its own.
    pub fn emulated_each(mut self, from_a: Conditions, from_b: Conditions) -> Self {
        self.kind = Kind::Emulated(Box::new([from_a, from_b]));
        self
    }

    /// The seed of an emulated link; each direction derives its own. 1 if not set.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    pub(crate) fn is_emulated(&self) -> bool {
        matches!(self.kind, Kind::Emulated(_))
    }
}

/// A link. It stays when the handle is dropped, unless it is emulated: then nothing passes any more.
#[derive(Debug)]
pub struct Link {
    ends: [(Host, String); 2],
    wire: Option<Wire>,
}

impl Link {
    pub(crate) fn make(spec: LinkSpec, number: u32, middle: Option<Host>) -> Result<Self> {
        let [(host_a, if_a, _), (host_b, if_b, _)] = &spec.ends;
        let mtu = spec.mtu;
        let wire = match (&spec.kind, middle) {
            (Kind::Emulated(conditions), Some(middle)) => {
                let names = [format!("l{number}a"), format!("l{number}b")];
                for (name, (host, interface, _)) in names.iter().zip(&spec.ends) {
                    veth::add((host, interface), (&middle, name), mtu)?;
                    middle.run(&format!("ip link set {name} arp off up"))?;
                    emulated_link::receive_in_order(&middle, name, 0);
                    // Segmentation then happens on the host, before the packet leaves it.
                    host.run(&format!(
                        "ethtool -K {interface} tso off tx-udp-segmentation off \
                         tx-sctp-segmentation off tx-gso-list off"
                    ))?;
                }
                Some(Wire::start(
                    &middle,
                    names,
                    mtu,
                    conditions.as_ref().clone(),
                    spec.seed,
                )?)
            }
            _ => {
                veth::add((host_a, if_a), (host_b, if_b), mtu)?;
                for (host, interface, _) in &spec.ends {
                    emulated_link::receive_in_order(host, interface, number as usize);
                }
                None
            }
        };
        let ends = spec.ends.map(|(host, interface, addresses)| {
            veth::set_up(&host, &interface, &addresses).map(|()| (host, interface))
        });
        let [a, b] = ends;
        let link = Self {
            ends: [a?, b?],
            wire,
        };
        if let Kind::Shaped(rate) = spec.kind {
            link.shape(rate)?;
        }
        End::BOTH.iter().try_for_each(|&end| link.wait_up(end))?;
        Ok(link)
    }

    /// The host at an end.
    pub fn host(&self, end: End) -> &Host {
        &self.ends[end as usize].0
    }

    /// The interface's name at an end.
    pub fn interface(&self, end: End) -> &str {
        &self.ends[end as usize].1
    }

    /// Takes the interface at an end down. Its IPv6 addresses and its routes are gone; after
    /// [`up`](Self::up) the kernel restores the IPv4 addresses' own routes only.
    ///
    /// # Errors
    /// If the interface is gone.
    pub fn down(&self, end: End) -> Result<()> {
        self.on(end, "ip link set dev", "down")
    }

    /// Brings the interface at an end up.
    ///
    /// # Errors
    /// If the interface is gone.
    pub fn up(&self, end: End) -> Result<()> {
        self.on(end, "ip link set dev", "up")
    }

    /// Changes the MTU of both ends.
    ///
    /// # Errors
    /// If the kernel refuses the value.
    pub fn set_mtu(&self, mtu: u32) -> Result<()> {
        if let Some(wire) = &self.wire {
            wire.set_mtu(mtu)?;
        }
        End::BOTH
            .iter()
            .try_for_each(|&end| self.on(end, "ip link set dev", &format!("mtu {mtu}")))
    }

    /// Limits both directions to so many bits per second with the kernel's token bucket filter, in
    /// place of an earlier limit.
    ///
    /// # Errors
    /// On an emulated link, whose rate is one of its conditions.
    pub fn shape(&self, bits_per_second: u64) -> Result<()> {
        ensure!(
            self.wire.is_none(),
            "an emulated link has its rate in its conditions"
        );
        let (burst, limit) = bucket(bits_per_second);
        let bucket = format!("root tbf rate {bits_per_second}bit burst {burst} limit {limit}");
        End::BOTH
            .iter()
            .try_for_each(|&end| self.on(end, "tc qdisc replace dev", &bucket))
    }

    /// Changes the conditions of both directions of an emulated link, from the next packet on.
    ///
    /// # Errors
    /// If the link is not emulated.
    pub fn set(&self, mut change: impl FnMut(&mut Conditions)) -> Result<()> {
        End::BOTH
            .iter()
            .try_for_each(|&from| self.set_from(from, &mut change))
    }

    /// The same for what comes from one end.
    ///
    /// # Errors
    /// As for [`set`](Self::set).
    pub fn set_from(&self, from: End, change: impl FnOnce(&mut Conditions)) -> Result<()> {
        self.wire()?.set(from, change);
        Ok(())
    }

    /// Fates of the packets from one end so far.
    ///
    /// # Errors
    /// If the link is not emulated.
    pub fn stats(&self, from: End) -> Result<WireStats> {
        self.wire()?.stats(from)
    }

    /// Time since an emulated link's start: the clock of [`Conditions::outages`].
    ///
    /// # Errors
    /// If the link is not emulated.
    pub fn elapsed(&self) -> Result<Duration> {
        Ok(self.wire()?.elapsed())
    }

    /// Removes the link and its interfaces.
    ///
    /// # Errors
    /// If an interface is gone already.
    pub fn remove(self) -> Result<()> {
        self.on(End::A, "ip link del dev", "")?;
        match self.wire {
            Some(_) => self.on(End::B, "ip link del dev", ""),
            None => Ok(()),
        }
    }

    fn wire(&self) -> Result<&Wire> {
        self.wire.as_ref().context("the link is not emulated")
    }

    /// Waits until the kernel has noticed that the other end is up: it does so by and by, and changes routes then.
    fn wait_up(&self, end: End) -> Result<()> {
        let line = format!("ip -o link show dev {}", self.interface(end));
        wait_until(HANG, "a link to be up", || {
            let shown = self.host(end).run(&line);
            shown.is_ok_and(|shown| shown.contains("state UP"))
        })
    }

    fn on(&self, end: End, command: &str, arguments: &str) -> Result<()> {
        let line = format!("{command} {} {arguments}", self.interface(end));
        self.host(end).run(&line).map(drop)
    }
}

/// Burst and limit in bytes for a token bucket filter: the burst covers 2 ms, or else the timer's
/// lateness would cost rate, and the queue 50 ms, enough for TCP to fill links as short as these.
fn bucket(rate: u64) -> (u64, u64) {
    let bytes = rate / 8;
    ((bytes / 500).max(16 << 10), (bytes / 20).max(128 << 10))
}
