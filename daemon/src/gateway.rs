//! Connections of others that this host forwards: between the networks behind it and hosts behind peers.
//! Their sockets are elsewhere, so what conntrack has of them stands for these.

use std::collections::BTreeSet;
use std::hash::Hasher as _;
use std::net::IpAddr;

use dibs_config::Config;
use dibs_policy::conntrack::Connection;
use dibs_policy::sockets::TcpCounts;
use dibs_policy::{Backstop, Ends, Error};
use nix::libc;

use crate::daemon::Daemon;
use crate::live::Live;
use crate::terms::{ends, flow_tuple, policy_ends, tuple};
use dibs_switch::conns::{Choice, Pair, Socket};
use dibs_switch::table::Conn;

/// conntrack's TCP states, include/uapi/linux/netfilter/nf_conntrack_tcp.h.
const SYN_SENT: u8 = 1;
const ESTABLISHED: u8 = 3;
const CLOSE_WAIT: u8 = 5;
const TIME_WAIT: u8 = 7;
const CLOSE: u8 = 8;

/// What conntrack is to note of each connection: when it began, which tells two of the same ends apart,
/// and its bytes.
const NOTES: [&str; 2] = [
    "/proc/sys/net/netfilter/nf_conntrack_timestamp",
    "/proc/sys/net/netfilter/nf_conntrack_acct",
];

/// Whether an address is behind this host, by its configuration.
pub(crate) fn is_behind(config: &Config, address: IpAddr) -> bool {
    config
        .daemon
        .gateway
        .iter()
        .any(|net| net.contains(&address))
}

/// Why this host does not forward what its configuration says it forwards, one sentence each.
pub(crate) fn faults(config: &Config) -> Vec<String> {
    let families = [
        ("net.ipv4.ip_forward", false),
        ("net.ipv6.conf.all.forwarding", true),
    ];
    let off = |(key, v6): &(&str, bool)| {
        let mut networks = config.daemon.gateway.iter();
        let meant = networks.any(|net| net.addr().is_ipv6() == *v6);
        let path = format!("/proc/sys/{}", key.replace('.', "/"));
        meant && std::fs::read_to_string(path).is_ok_and(|text| text.trim() == "0")
    };
    let say = |(key, _): (&str, bool)| {
        format!("gateway: this host forwards nothing, for {key} is 0: run `sysctl -w {key}=1`")
    };
    families.into_iter().filter(off).map(say).collect()
}

impl Daemon {
    /// Has the kernel note what there is no socket to ask for. To be called once rules stand, for only
    /// then it tracks anything.
    pub(crate) fn note_passing(&self) {
        if self.config.daemon.gateway.is_empty() {
            return;
        }
        for note in NOTES {
            if let Err(error) = std::fs::write(note, "1") {
                tracing::warn!("{note}: {error}: forwarded connections are told apart less well");
            }
        }
    }

    /// Whether a connection is not this host's own, but passes it.
    pub(crate) fn passes(&self, pair: &Pair) -> bool {
        let local = pair.local.ip();
        is_behind(&self.config, local)
            && !self.state.borrow().addresses.contains(&local)
            && self.peer_of(pair.remote.ip()).is_some()
    }

    /// A tracked connection that passes this host.
    pub(crate) fn passing(&self, entry: &Connection) -> Option<Live> {
        if i32::from(entry.original.protocol) != libc::IPPROTO_TCP {
            return None;
        }
        let pair = ends(entry).into_iter().find(|pair| self.passes(pair))?;
        let began = entry.original.source == pair.local.into();
        let in_order = |[first, second]: [u64; 2]| match began {
            true => (first, second),
            false => (second, first),
        };
        let (sent, received) = in_order(entry.bytes.unwrap_or_default());
        // It shifts the windows that the far end gives.
        let (_, scale) = in_order(entry.window_scales.map(u64::from));
        let state = entry.tcp_state.unwrap_or(ESTABLISHED);
        Some(Live {
            pair,
            peer: self.peer_of(pair.remote.ip())?,
            socket: name(entry),
            uid: None,
            inode: 0,
            bound: false,
            over: matches!(state, TIME_WAIT | CLOSE),
            established: state == ESTABLISHED,
            opening: state == SYN_SENT,
            counts: TcpCounts {
                window_scale: u8::try_from(scale).expect("it was a byte"),
                bytes_acked: sent,
                bytes_received: received,
                ..TcpCounts::default()
            },
            mark: entry.mark,
        })
    }

    /// All connections that pass this host.
    pub(crate) async fn all_passing(&self) -> Result<Vec<Live>, Error> {
        if self.config.daemon.gateway.is_empty() {
            return Ok(Vec::new());
        }
        self.conntrack()?.list(|entry| self.passing(&entry)).await
    }

    /// Those of these connections that pass this host.
    pub(crate) async fn passing_of(&self, pairs: &[Pair]) -> Result<Vec<Live>, Error> {
        let mut found = Vec::new();
        for pair in pairs.iter().filter(|pair| self.passes(pair)) {
            let tuple = tuple(pair);
            let entry = self.conntrack()?.get(&tuple).await?;
            found.extend(entry.and_then(|entry| self.passing(&entry)));
        }
        Ok(found)
    }

    /// Whether an entry that is gone was that of a connection which passes, and goes on as far as anybody
    /// knows: somebody flushed the table.
    fn was_passing(&self, entry: &Connection) -> bool {
        let went_on = |state| (ESTABLISHED..=CLOSE_WAIT).contains(&state);
        entry.tcp_state.is_some_and(went_on) && self.passing(entry).is_some()
    }

    /// The entry of a connection that passes is gone. Whether the connection goes on, as far as anybody
    /// knows; otherwise nothing of the next one with its ends is dropped for that.
    pub(crate) async fn lose(&self, entry: &Connection) -> bool {
        let Some(Live { pair, .. }) = self.passing(entry) else {
            return false;
        };
        let goes_on = self.was_passing(entry);
        {
            let state = &mut *self.state.borrow_mut();
            if goes_on {
                // Its next entry has another name.
                let rename = |conn: &mut Conn| conn.choice.rename(Socket::UNKNOWN);
                state.conns.update(&pair, rename);
            } else {
                state.conns.update(&pair, |conn| {
                    conn.ended |= conn.is_marked();
                    conn.lock.release();
                });
            }
        }
        if !goes_on {
            self.note_locks().await;
        }
        goes_on
    }

    /// Whether a connection that has no entry may live all the same.
    pub(crate) fn may_live(&self, pair: &Pair) -> bool {
        self.passes(pair) && !self.state.borrow().conns.get(pair).ended
    }

    /// Whether a choice for the connection `live` was made for an earlier one. What passes and has a new
    /// entry, by our hand or its next packet, is named anew.
    pub(crate) fn has_taken(&self, live: &Live, choice: Choice) -> bool {
        if live.uid.is_none() && live.established && choice.socket == Socket::UNKNOWN {
            self.update(&live.pair, |conn| conn.choice.rename(live.socket));
            return false;
        }
        live.socket != choice.socket
    }

    /// A connection that passes has a new entry, by our hand: what was chosen for it stands, and if its
    /// host does not know it any more it says so.
    pub(crate) async fn rename(&self, pair: &Pair, bump: u8) -> Result<(), Error> {
        for live in self.passing_of(std::slice::from_ref(pair)).await? {
            self.update(pair, |conn| conn.choice.rename(live.socket));
            if !self.bumps.is_outside(bump) {
                // Without the data path nobody can be asked.
                let _ = self.driver.solicit(bump, flow_tuple(pair));
            }
        }
        Ok(())
    }

    /// Brings the backstop to what is locked of connections that pass: what is forged of others their
    /// sockets sort out.
    pub(crate) async fn note_locks(&self) {
        let mut backstop = self.backstop.lock().await;
        self.tell_locks(&mut backstop).await;
    }

    /// As [`note_locks`](Self::note_locks), for those who hold the backstop.
    pub(crate) async fn tell_locks(&self, backstop: &mut Backstop) {
        if self.config.daemon.gateway.is_empty() {
            return;
        }
        let before = backstop.standing().clone();
        // What failed shows in how it stands now, and is tried again.
        let _ = backstop.set_locked(self.locked_passing()).await;
        self.tell_standing(&before, backstop.standing());
    }

    /// The connections that pass and are locked.
    pub(crate) fn locked_passing(&self) -> BTreeSet<Ends> {
        let locked: Vec<Pair> = self.state.borrow().conns.locked().collect();
        let passing = locked.into_iter().filter(|pair| self.passes(pair));
        passing.map(|pair| policy_ends(&pair)).collect()
    }
}

/// What tells a tracked connection from others of the same ends, before and after it.
fn name(entry: &Connection) -> Socket {
    // The kernel makes its number of the entry's place in memory and its ends, which may both come again.
    let mut hash = std::hash::DefaultHasher::new();
    hash.write_u32(entry.id);
    hash.write_u64(entry.since.unwrap_or(0));
    // 0 is nobody's name.
    Socket((hash.finish() as u32).max(1))
}
