//! The main thread's end of the data path.

pub mod bumps;
pub(crate) mod endpoints;
pub(crate) mod links;
pub(crate) mod notices;
pub mod preferences;
pub(crate) mod priority;
pub(crate) mod rpc;
pub(crate) mod socket;
pub(crate) mod thread;
pub(crate) mod volumes;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::Sender;

use dibs_core::Time;
use dibs_core::node::{ConnSnapshot, ControlError, FlowScheduler, PathSnapshot, PeerSnapshot};
use dibs_core::preference::Usage;
use dibs_io::{PathSocket, Tun, Waker};
use dibs_settings::{BumpId, Hint, Scheduler};
use dibs_switch::messages::Message;
use dibs_wire::FlowKey;
use tokio::sync::oneshot;

pub(super) enum Command {
    AddTun {
        bump: BumpId,
        tun: Box<Tun>,
        done: oneshot::Sender<io::Result<()>>,
    },
    RemoveTun {
        bump: BumpId,
        done: oneshot::Sender<Option<Box<Tun>>>,
    },
    SetSocket {
        path: usize,
        socket: Box<PathSocket>,
        done: oneshot::Sender<io::Result<()>>,
    },
    SetPath {
        path: usize,
        up: bool,
        mtu: u16,
        addresses: Vec<IpAddr>,
    },
    SetUsage {
        path: usize,
        usage: Usage,
    },
    SetEndpoints {
        peer: usize,
        endpoints: Vec<(usize, SocketAddr)>,
    },
    SetScheduler(Scheduler),
    SetFlowSchedulers(Vec<FlowScheduler>),
    Prefer(Option<Hint>),
    ExpectRate {
        path: usize,
        to: IpAddr,
        bytes_per_second: u64,
    },
    SetAddresses(Vec<IpAddr>),
    /// Those of them that the paths' interfaces have.
    SetReachable(Vec<IpAddr>),
    SendControl {
        peer: usize,
        message: Message,
        done: oneshot::Sender<Result<(), ControlError>>,
    },
    ControlDone {
        peer: usize,
    },
    Drain {
        bump: BumpId,
        tuple: FlowKey,
        window_scale: u8,
        done: oneshot::Sender<()>,
    },
    EndDrain {
        bump: BumpId,
        tuple: FlowKey,
    },
    Resume {
        bump: BumpId,
        tuple: FlowKey,
        outstanding: u32,
    },
    Solicit {
        bump: BumpId,
        tuple: FlowKey,
    },
    Snapshot(oneshot::Sender<Snapshot>),
    Conns(oneshot::Sender<(Time, Vec<ConnSnapshot>)>),
    Opened {
        bump: BumpId,
        tuples: Vec<FlowKey>,
        done: oneshot::Sender<Vec<FlowKey>>,
    },
    Ping(oneshot::Sender<()>),
    Stop,
}

/// What the data path knows, at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The moment, by the clock of the data path.
    pub now: Time,
    /// By index of the configuration.
    pub peers: Vec<PeerSnapshot>,
    /// All paths to all peers.
    pub paths: Vec<PathSnapshot>,
    /// By index of the configuration's paths.
    pub sockets: Vec<SocketSnapshot>,
    /// Bytes of UDP payload that sessions with all peers sent and opened since the start, by index of the
    /// configuration's paths.
    pub carried: Vec<u64>,
    /// All counters by name.
    pub counters: Vec<(&'static str, u64)>,
}

/// What is known of a path's socket.
#[derive(Clone, Copy, Debug)]
pub struct SocketSnapshot {
    /// Its interface exists.
    pub open: bool,
    /// Runs go out as one over IPv4.
    pub gso_v4: bool,
    /// Runs go out as one over IPv6.
    pub gso_v6: bool,
    /// Errors of the system.
    pub errors: u64,
    /// Sends dropped.
    pub dropped: u64,
    /// Datagrams that the kernel dropped before they were received.
    pub overflowed: u64,
}

/// What is counted beside the node.
#[derive(Default)]
pub(super) struct DriverCounters {
    pub(super) tun_refused: u64,
    pub(super) tun_missing: u64,
}

impl DriverCounters {
    pub(super) fn named(&self) -> [(&'static str, u64); 2] {
        [
            ("tun_refused", self.tun_refused),
            ("tun_missing", self.tun_missing),
        ]
    }
}

/// The thread of the data path has ended.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the data path has ended")]
pub struct Gone;

/// Commands to the data path. Cheap to clone.
#[derive(Clone)]
pub struct Driver {
    commands: Sender<Command>,
    waker: Waker,
}

impl Driver {
    /// Commands go to the other end of `commands`, and wake the data path.
    pub(super) fn new(commands: Sender<Command>, waker: Waker) -> Self {
        Self { commands, waker }
    }

    fn send(&self, command: Command) -> Result<(), Gone> {
        self.commands.send(command).map_err(|_| Gone)?;
        self.waker.wake();
        Ok(())
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, Gone> {
        let (done, answer) = oneshot::channel();
        self.send(command(done))?;
        answer.await.map_err(|_| Gone)
    }

    /// Reads and writes `tun` for `bump` from now on.
    pub async fn add_tun(&self, bump: BumpId, tun: Tun) -> Result<io::Result<()>, Gone> {
        let tun = Box::new(tun);
        self.ask(|done| Command::AddTun { bump, tun, done }).await
    }

    /// Lets go of a bump's TUN and returns it: closing it takes a while.
    pub async fn remove_tun(&self, bump: BumpId) -> Result<Option<Box<Tun>>, Gone> {
        self.ask(|done| Command::RemoveTun { bump, done }).await
    }

    /// Uses `socket` for a local path from now on.
    pub async fn set_socket(
        &self,
        path: usize,
        socket: PathSocket,
    ) -> Result<io::Result<()>, Gone> {
        let socket = Box::new(socket);
        self.ask(|done| Command::SetSocket { path, socket, done })
            .await
    }

    /// The interface of a local path came, went, or has another MTU or other addresses.
    pub fn set_path(
        &self,
        path: usize,
        up: bool,
        mtu: u16,
        addresses: Vec<IpAddr>,
    ) -> Result<(), Gone> {
        self.send(Command::SetPath {
            path,
            up,
            mtu,
            addresses,
        })
    }

    /// What a local path may be used for changed.
    pub fn set_usage(&self, path: usize, usage: Usage) -> Result<(), Gone> {
        self.send(Command::SetUsage { path, usage })
    }

    /// A peer listens there from now on, by index of the local path.
    pub fn set_endpoints(
        &self,
        peer: usize,
        endpoints: Vec<(usize, SocketAddr)>,
    ) -> Result<(), Gone> {
        self.send(Command::SetEndpoints { peer, endpoints })
    }

    /// New data is shared out by this scheduler from now on.
    pub fn set_scheduler(&self, scheduler: Scheduler) -> Result<(), Gone> {
        self.send(Command::SetScheduler(scheduler))
    }

    /// New data of the connections that these select is shared out by theirs from now on.
    pub fn set_flow_schedulers(&self, schedulers: Vec<FlowScheduler>) -> Result<(), Gone> {
        self.send(Command::SetFlowSchedulers(schedulers))
    }

    /// New data goes by this path from now on as long as that is usable; none: as the scheduler chooses.
    pub fn prefer(&self, hint: Option<Hint>) -> Result<(), Gone> {
        self.send(Command::Prefer(hint))
    }

    /// The addresses of this host.
    pub fn set_addresses(&self, addresses: Vec<IpAddr>) -> Result<(), Gone> {
        self.send(Command::SetAddresses(addresses))
    }

    /// Those of them that the paths' interfaces have.
    pub fn set_reachable(&self, addresses: Vec<IpAddr>) -> Result<(), Gone> {
        self.send(Command::SetReachable(addresses))
    }

    /// Hands a message for the peer's daemon to the node. Connections in it have the names that this host gives them.
    pub async fn send_control(
        &self,
        peer: usize,
        message: Message,
    ) -> Result<Result<(), ControlError>, Gone> {
        self.ask(|done| Command::SendControl {
            peer,
            message,
            done,
        })
        .await
    }

    /// A message of the peer's daemon has been dealt with: there is room for another one.
    pub fn control_done(&self, peer: usize) {
        // Without the data path none comes.
        let _ = self.send(Command::ControlDone { peer });
    }

    /// Tells of the rate that a path to the host `to` has just carried for others.
    pub fn expect_rate(&self, path: usize, to: IpAddr, bytes_per_second: u64) -> Result<(), Gone> {
        self.send(Command::ExpectRate {
            path,
            to,
            bytes_per_second,
        })
    }

    /// Returns once nothing that a connection sent by `bump` can be overtaken any more. Its kernel
    /// sends nothing new meanwhile, and goes on after [`end_drain`](Self::end_drain), or by itself
    /// after a moment.
    pub async fn drain(&self, bump: BumpId, tuple: FlowKey, window_scale: u8) -> Result<(), Gone> {
        self.ask(|done| Command::Drain {
            bump,
            tuple,
            window_scale,
            done,
        })
        .await
    }

    /// The connection leaves by another way from now on.
    pub fn end_drain(&self, bump: BumpId, tuple: FlowKey) -> Result<(), Gone> {
        self.send(Command::EndDrain { bump, tuple })
    }

    /// Takes up a connection that went on before this daemon started, of which the kernel has
    /// `outstanding` bytes under way.
    pub fn resume(&self, bump: BumpId, tuple: FlowKey, outstanding: u32) -> Result<(), Gone> {
        self.send(Command::Resume {
            bump,
            tuple,
            outstanding,
        })
    }

    /// Has this host's kernel say by `bump` where a connection stands.
    pub fn solicit(&self, bump: BumpId, tuple: FlowKey) -> Result<(), Gone> {
        self.send(Command::Solicit { bump, tuple })
    }

    /// What there is to see, but for the connections.
    pub async fn snapshot(&self) -> Result<Snapshot, Gone> {
        self.ask(Command::Snapshot).await
    }

    /// All connections on bumps, and the moment.
    pub async fn conns(&self) -> Result<(Time, Vec<ConnSnapshot>), Gone> {
        self.ask(Command::Conns).await
    }

    /// Connections among these whose peer has sent something by `bump`.
    pub async fn opened(&self, bump: BumpId, tuples: Vec<FlowKey>) -> Result<Vec<FlowKey>, Gone> {
        self.ask(|done| Command::Opened { bump, tuples, done })
            .await
    }

    /// Returns once the data path has taken the command: it lives.
    pub async fn ping(&self) -> Result<(), Gone> {
        self.ask(Command::Ping).await
    }

    /// Ends the data path.
    pub fn stop(&self) {
        // It may have ended by itself.
        let _ = self.send(Command::Stop);
    }
}
