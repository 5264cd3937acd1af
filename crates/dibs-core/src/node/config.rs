//! What a node is told at its start.

use std::net::{IpAddr, SocketAddr};
use std::ops::{Index, IndexMut};

use dibs_settings::{Handshake, Hint, Opening, Role, Scheduler};
use ipnet::IpNet;

use crate::bump::{Bump, Pads};
use crate::path_index::PathIndex;
use crate::preference::Usage;
use crate::session::{Integrity, PublicKey, Secret, StaticSecret, Suite};

/// A local interface that a path uses.
#[derive(Clone, Debug)]
pub struct LocalPath {
    /// Our trust label.
    pub trusted: bool,
    /// The interface's MTU.
    pub mtu: u16,
    /// The interface can be used.
    pub up: bool,
    /// Usage that the user lets it have.
    pub usage: Usage,
    /// Its addresses here: what peers send to one of them is for this path.
    pub addresses: Vec<IpAddr>,
    /// Addresses that are translated to those on the way here.
    pub public: Vec<IpAddr>,
}

/// All of them, by index.
#[derive(Debug)]
pub(crate) struct LocalPaths(Vec<LocalPath>);

impl LocalPaths {
    pub(crate) const fn new(paths: Vec<LocalPath>) -> Self {
        Self(paths)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (PathIndex, &LocalPath)> {
        let indices = (0..).map(PathIndex::new);
        indices.zip(&self.0)
    }
}

impl Index<PathIndex> for LocalPaths {
    type Output = LocalPath;

    fn index(&self, path: PathIndex) -> &LocalPath {
        &self.0[path.get()]
    }
}

impl IndexMut<PathIndex> for LocalPaths {
    fn index_mut(&mut self, path: PathIndex) -> &mut LocalPath {
        &mut self.0[path.get()]
    }
}

impl LocalPath {
    /// True if peers reach this path, and no other one of this host, by an address.
    pub fn is_at(&self, addr: IpAddr) -> bool {
        self.addresses.contains(&addr) || self.public.contains(&addr)
    }

    /// True if anything may be sent by it.
    pub fn is_usable(&self) -> bool {
        self.up && self.usage.role != Role::Never
    }
}

/// A peer.
pub struct PeerConfig {
    /// Its static public key.
    pub public: PublicKey,
    /// The preshared key, if there is one; in a box, which it does not leave.
    pub preshared: Option<Box<Secret>>,
    /// The hosts behind it: only they are sent to it, and only they may appear as a source.
    pub prefixes: Vec<IpNet>,
    /// Endpoints of the peer, by index of our local path. Without any, we wait to be called.
    pub endpoints: Vec<(usize, SocketAddr)>,
    /// Connections that the peer may begin, among all that is this host's or behind it.
    pub accept: Vec<Opening>,
    /// Addresses, one of each IP version at most, that stand here for those of the peer that are not in `prefixes`, because
    /// other peers may have the same. They are in `prefixes`, and on no interface.
    pub appears_as: Vec<IpAddr>,
}

/// Everything that a node needs to know.
pub struct NodeConfig {
    /// Our static key.
    pub private: Box<StaticSecret>,
    /// The AEAD of sessions that we initiate.
    pub suite: Suite,
    /// Integrity of bare datagrams, as far as agreed to (docs/protocol.md, 9).
    pub integrity: Integrity,
    /// By which paths keys may be agreed.
    pub handshake: Handshake,
    /// The local paths.
    pub paths: Vec<LocalPath>,
    /// The bumps that are carried, of different numbers.
    pub bumps: Vec<Bump>,
    /// Random bytes for bumps that split: seeded by the system, and by nothing that this node uses elsewhere
    /// (docs/threat-model.md).
    pub pads: Pads,
    /// The peers.
    pub peers: Vec<PeerConfig>,
    /// Addresses of this host: only to them does anything go out of a TUN.
    pub addresses: Vec<IpAddr>,
    /// Addresses that the paths' interfaces have: peers may open connections to them, if nothing else is said.
    pub reachable: Vec<IpAddr>,
    /// Networks that this host forwards for: what is for a host there goes out of a TUN too.
    pub gateway: Vec<IpNet>,
    /// Networks that the peers reach by this host beside, in this host's name: without those that [`left_out`] says,
    /// and without hosts behind peers. None: nothing.
    ///
    /// [`left_out`]: dibs_settings::left_out
    pub exit: Vec<IpNet>,
    /// Least share of each chained flow's bytes that goes by trusted paths, 0 to 1.
    pub trusted_share: f64,
    /// Chained flows wait while no trusted path is alive; otherwise untrusted ones carry them.
    pub hold_without_trusted: bool,
    /// How new data is shared out over the paths.
    pub scheduler: Scheduler,
    /// The path that the user prefers.
    pub hint: Option<Hint>,
}
