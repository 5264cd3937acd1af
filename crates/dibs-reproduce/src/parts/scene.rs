//! Two hosts, a trusted and an untrusted link, and someone who listens to the latter.

use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context as _, Result, anyhow, ensure};
use dibs_eavesdrop::{Link, Tap};
use dibs_lab::dibs::{Dibsd, PORT, Programs, Settings, Trust};
use dibs_lab::load::Transport;
use dibs_lab::site::{Site, UNTRUSTED, addresses};
use dibs_lab::{Capture, Lab, Recording};

/// Of both links: slow enough that nothing of it is missed.
const RATE: u64 = 50_000_000;
/// Rules for connections to these ports.
const RULES: &str = "[[rule]]\nbump = \"scramble\"\ndport = 7001\n\
                     [[rule]]\nbump = \"share\"\ndport = 7002\n\
                     [[rule]]\nbump = \"seal\"\ndport = 7003\n";

/// What a connection is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Nothing, by the untrusted link.
    Plain,
    /// The scrambler.
    Scramble,
    /// Secret sharing.
    Share,
    /// Encryption.
    Seal,
}

impl Way {
    pub(super) const ALL: [Self; 4] = [Self::Plain, Self::Scramble, Self::Share, Self::Seal];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Scramble => "scramble",
            Self::Share => "share",
            Self::Seal => "seal",
        }
    }

    fn to(self) -> SocketAddr {
        let (link, port) = match self {
            Self::Plain => (1, 7000),
            Self::Scramble => (0, 7001),
            Self::Share => (0, 7002),
            Self::Seal => (0, 7003),
        };
        SocketAddr::new(addresses(link)[1], port)
    }
}

/// What the hosts call the link that somebody listens to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Label {
    /// Untrusted, as it is.
    True,
    /// Trusted.
    False,
}

/// See the module.
pub(super) struct Scene {
    site: Site,
    _daemons: [Dibsd; 2],
    _lab: Lab,
}

impl Scene {
    /// With this `trusted_share`. The path that somebody listens to is preferred: what may go by it does.
    pub(super) fn new(programs: &Programs, trusted_share: f64, label: Label) -> Result<Self> {
        let mut lab = Lab::new()?;
        let site = Site::new(&mut lab, ["a", "b"], 2, |_, link| link.shaped(RATE))?;
        let daemon = &format!("trusted_share = {trusted_share:.2}\n");
        let settings = [RULES, ""].map(|tables| Settings { daemon, tables });
        let mut paths = Site::paths(2);
        if label == Label::False {
            paths[1].trust = Trust::Trusted;
        }
        let daemons = programs.join([&site.a, &site.b], &paths, settings)?;
        for daemon in &daemons {
            let words = ["path", "prefer", "wlan", "--delta", "1000"];
            daemon.ctl::<serde_json::Value>(&words)?;
        }
        Ok(Self {
            site,
            _daemons: daemons,
            _lab: lab,
        })
    }

    /// Sends the bytes from one host to the other by a connection of their own, and returns what passed the link that
    /// somebody listens to meanwhile.
    ///
    /// # Errors
    /// If they do not arrive as they were sent.
    pub(super) fn overhear(&self, way: Way, bytes: &[u8]) -> Result<Recording> {
        let Site { a, b, .. } = &self.site;
        let capture = Capture::start(b, UNTRUSTED)?;
        let listener = Transport::Tcp.listen(b, way.to())?;
        let mut near = Transport::Tcp.connect(a, way.to())?;
        let mut far = dibs_lab::load::accept(&listener)?;
        let sent = bytes.to_vec();
        let sender = a.thread("sender", move || near.write_all(&sent).map(|()| drop(near)))?;
        let mut received = Vec::new();
        far.read_to_end(&mut received).context("receive")?;
        let joined = sender.join().map_err(|_| anyhow!("the sender panicked"))?;
        joined.context("send")?;
        ensure!(received == bytes, "other bytes arrived than were sent");
        capture.finish()
    }
}

/// What the far end of the untrusted link received, for the eavesdropper.
pub(super) fn tap(recording: &Recording) -> Tap {
    let mut tap = Tap::new(PORT);
    for packet in recording.packets.iter().filter(|packet| !packet.outgoing) {
        let at = packet
            .at
            .duration_since(UNIX_EPOCH)
            .unwrap_or(Duration::ZERO);
        tap.frame(at, Link::Ethernet, &packet.frame);
    }
    tap
}
