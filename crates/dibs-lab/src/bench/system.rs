//! The systems that are compared, each on hosts of its own.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};

use super::Stage;
use crate::baseline::{self, Tunnel};
use crate::dibs::{Dibsd, Settings};
use crate::lab::Lab;
use crate::link::LinkSpec;
use crate::load::Transport;
use crate::site::{Site, addresses};

/// Where the servers listen.
pub(super) const PORT: u16 = 7000;
/// Puts connections to [`PORT`] on the scrambler from their start.
const RULE: &str = "[[rule]]\nbump = \"scramble\"\nprotocol = \"tcp\"\ndport = 7000\n";

/// The same for other bumps.
const SEAL_RULE: &str = "[[rule]]\nbump = \"seal\"\nprotocol = \"tcp\"\ndport = 7000\n";
const SHARE_RULE: &str = "[[rule]]\nbump = \"share\"\nprotocol = \"tcp\"\ndport = 7000\n";

/// Links between the hosts of each pair.
const LINKS: usize = 2;

/// A way to carry a stream from one host to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum System {
    /// TCP over the trusted link.
    Plain,
    /// Two subflows, one a link.
    Mptcp,
    /// A tunnel over the trusted link.
    WireguardGo,
    /// Another one.
    OpenVpn,
    /// dibs over both.
    Scramble,
    /// dibs over both, encrypting.
    Seal,
    /// The same, sharing secrets.
    Share,
    /// dibs over both, but nothing on the scrambler until it is asked for.
    Idle,
}

impl System {
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Plain => "plain TCP",
            Self::Mptcp => "kernel MPTCP",
            Self::WireguardGo => "wireguard-go",
            Self::OpenVpn => "OpenVPN",
            Self::Scramble => "scramble",
            Self::Seal => "seal",
            Self::Share => "share",
            Self::Idle => "plain, dibsd running",
        }
    }
}

/// Where an experiment's contestants live.
pub(super) struct Place<'a> {
    stage: &'a Stage<'a>,
    lab: Lab,
    pairs: usize,
}

/// A system, ready to run.
pub(super) struct Contestant {
    pub(super) label: String,
    pub(super) site: Site,
    pub(super) to: SocketAddr,
    pub(super) transport: Transport,
    pub(super) daemons: Option<[Dibsd; 2]>,
    pub(super) on_bump: bool,
    pub(super) tunnel: Option<Tunnel>,
}

/// What the counters say, to be compared before and after.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    /// Bytes that the first host sent by each link, headers and all.
    pub(super) links: Vec<u64>,
    /// Chunks that its dibsd sent again.
    pub(super) resent: u64,
    /// Datagram bytes that its dibsd sent, over all paths.
    datagrams: u64,
}

impl<'a> Place<'a> {
    pub(super) fn new(stage: &'a Stage<'a>) -> Result<Self> {
        Ok(Self {
            stage,
            lab: Lab::new()?,
            pairs: 0,
        })
    }

    /// Brings a system up on two hosts and two links of its own.
    pub(super) fn contestant(
        &mut self,
        system: System,
        label: &str,
        links: impl Fn(&str, LinkSpec) -> LinkSpec,
    ) -> Result<Contestant> {
        self.set_up(system, label, links)
            .with_context(|| label.to_owned())
    }

    /// Brings systems up as [`contestant`](Self::contestant) does one, by their usual names.
    pub(super) fn contestants(
        &mut self,
        systems: &[System],
        links: impl Fn(&str, LinkSpec) -> LinkSpec,
    ) -> Result<Vec<Contestant>> {
        let systems = systems.iter();
        systems
            .map(|system| self.contestant(*system, system.label(), &links))
            .collect()
    }

    fn set_up(
        &mut self,
        system: System,
        label: &str,
        links: impl Fn(&str, LinkSpec) -> LinkSpec,
    ) -> Result<Contestant> {
        self.pairs += 1;
        let names = ["a", "b"].map(|name| format!("{name}{}", self.pairs));
        let site = Site::new(&mut self.lab, [&names[0], &names[1]], LINKS, links)?;
        let [near, far] = addresses(0);
        let hosts = [&site.a, &site.b];
        let ends = [(&site.a, near), (&site.b, far)];
        let mut transport = Transport::Tcp;
        let (mut tunnel, mut daemons): (Option<Tunnel>, _) = (None, None);
        let mut join = |daemon: &str, tables: &str| -> Result<()> {
            let both = Settings { daemon, tables: "" };
            let settings = [Settings { daemon, tables }, both];
            let programs = self.stage.programs;
            daemons = Some(programs.join(hosts, &Site::paths(LINKS), settings)?);
            Ok(())
        };
        match system {
            System::Plain => {}
            System::Mptcp => {
                transport = Transport::Mptcp;
                baseline::mptcp(&site.a, &site.b, &[addresses(1)[1]])?;
            }
            System::WireguardGo => tunnel = Some(baseline::wireguard_go(ends[0], ends[1], None)?),
            System::OpenVpn => tunnel = Some(baseline::openvpn_as_it_comes(ends[0], ends[1])?),
            System::Scramble => join("", RULE)?,
            System::Seal => {
                let scheduler = self.stage.options.scheduler.as_ref();
                let line = scheduler.map(|name| format!("scheduler = \"{name}\""));
                join(&line.unwrap_or_default(), SEAL_RULE)?;
            }
            System::Share => join("", SHARE_RULE)?,
            System::Idle => join("", "")?,
        }
        Ok(Contestant {
            label: label.to_owned(),
            to: SocketAddr::new(tunnel.as_ref().map_or(far, |tunnel| tunnel.b), PORT),
            transport,
            daemons,
            on_bump: matches!(system, System::Scramble | System::Seal | System::Share),
            tunnel,
            site,
        })
    }
}

impl Contestant {
    /// Its daemons, where it is one of dibs.
    pub(super) fn daemons(&self) -> &[Dibsd; 2] {
        let daemons = self.daemons.as_ref();
        daemons.expect("this contestant has daemons")
    }

    pub(super) fn counts(&self) -> Result<Counts> {
        let mut counts = Counts {
            links: self.site.sent()?,
            ..Counts::default()
        };
        if let Some([daemon, _]) = &self.daemons {
            let status = daemon.status()?;
            counts.datagrams = status.paths.iter().map(|path| path.bytes_sent).sum();
            counts.resent = status.counters.get("chunk_resent").copied().unwrap_or(0);
        }
        Ok(counts)
    }

    /// What was counted since, when so many bytes were sent.
    ///
    /// # Errors
    /// If they should have gone through dibs and did not.
    pub(super) fn since(&self, before: &Counts, sent: u64) -> Result<Counts> {
        let now = self.counts()?;
        let links = now.links.iter().zip(&before.links);
        let datagrams = now.datagrams - before.datagrams;
        ensure!(
            !self.on_bump || datagrams >= sent,
            "{sent} bytes were sent, of which dibsd carried {datagrams} at most"
        );
        Ok(Counts {
            links: links.map(|(now, before)| now - before).collect(),
            resent: now.resent - before.resent,
            datagrams,
        })
    }
}
