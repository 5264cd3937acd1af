//! The main thread's end of the data path: commands, notices, and messages to peers' daemons.
//!
//! Notices go over a bounded channel, without the data path ever waiting for it, and without losing anything: what finds no
//! room stays where it is, which has bounds of its own, until there is some.

pub mod bumps;
pub(crate) mod priority;
pub(crate) mod socket;
pub(crate) mod thread;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

use dibs_core::Time;
use dibs_core::node::{
    ConnSnapshot, ControlError, Event, FlowScheduler, PathSnapshot, PeerSnapshot,
};
use dibs_core::preference::Usage;
use dibs_io::{PathSocket, Tun, Waker};
use dibs_settings::{BumpId, Hint, Scheduler};
use dibs_switch::messages::{ANSWER_TIMEOUT, Body, Message, Outcome, Unanswered};
use dibs_wire::FlowKey;
use tokio::sync::{mpsc, oneshot};

/// A connection that is to fall silent on a bump.
pub(super) struct Drain {
    bump: BumpId,
    tuple: FlowKey,
    window_scale: u8,
    /// Its kernel is given no data by the bump from then on.
    refuses: bool,
}

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
        /// Time for which somebody waits for what comes of it.
        patience: Option<Duration>,
        done: oneshot::Sender<Result<(), ControlError>>,
    },
    ControlDone {
        peer: usize,
    },
    Measure {
        peer: usize,
        /// The measurement, and its paths.
        load: (u64, Vec<u8>),
        done: oneshot::Sender<bool>,
    },
    Drain(Drain, oneshot::Sender<()>),
    EndDrain {
        bump: BumpId,
        tuple: FlowKey,
    },
    Resume {
        bump: BumpId,
        tuple: FlowKey,
        outstanding: u32,
    },
    Match {
        peer: usize,
        ours: FlowKey,
        theirs: FlowKey,
    },
    ForgetMatch {
        peer: usize,
        ours: FlowKey,
    },
    Enter {
        bump: BumpId,
        tuple: FlowKey,
        was: Option<BumpId>,
    },
    Solicit {
        bump: BumpId,
        tuple: FlowKey,
    },
    Snapshot(oneshot::Sender<Snapshot>),
    Conns(oneshot::Sender<(Time, Vec<ConnSnapshot>)>),
    Seen {
        bump: BumpId,
        tuples: Vec<FlowKey>,
        done: oneshot::Sender<Vec<FlowKey>>,
    },
    Ping(oneshot::Sender<()>),
    Stop,
}

/// State of the data path at one moment.
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

/// State of a path's socket.
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
    pub(super) tun_write_refused: u64,
    pub(super) tun_missing: u64,
}

impl DriverCounters {
    pub(super) fn named(&self) -> [(&'static str, u64); 2] {
        [
            ("tun_write_refused", self.tun_write_refused),
            ("tun_missing", self.tun_missing),
        ]
    }
}

/// The thread of the data path has ended.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("dibsd is stopping, or starts again: repeat the command")]
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

    /// Use that a local path may be put to from now on.
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

    /// Addresses of those that the paths' interfaces have.
    pub fn set_reachable(&self, addresses: Vec<IpAddr>) -> Result<(), Gone> {
        self.send(Command::SetReachable(addresses))
    }

    /// Hands a message for the peer's daemon to the node, of which nobody waits for what comes of it after his `patience`. Connections
    /// in it have the names that this host gives them.
    pub async fn send_control(
        &self,
        peer: usize,
        message: Message,
        patience: Option<Duration>,
    ) -> Result<Result<(), ControlError>, Gone> {
        self.ask(|done| Command::SendControl {
            peer,
            message,
            patience,
            done,
        })
        .await
    }

    /// A message of the peer's daemon has been dealt with: there is room for another one.
    pub fn control_done(&self, peer: usize) {
        // Without the data path none comes.
        let _ = self.send(Command::ControlDone { peer });
    }

    /// Puts load on paths to a peer, by their ids; false during another measurement.
    pub async fn measure(&self, peer: usize, run: u64, paths: Vec<u8>) -> Result<bool, Gone> {
        let load = (run, paths);
        self.ask(|done| Command::Measure { peer, load, done }).await
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
    /// after a moment. If it `refuses` data by the bump, the kernel is given none until then.
    pub async fn drain(
        &self,
        bump: BumpId,
        tuple: FlowKey,
        window_scale: u8,
        refuses: bool,
    ) -> Result<(), Gone> {
        let drain = Drain {
            bump,
            tuple,
            window_scale,
            refuses,
        };
        self.ask(|done| Command::Drain(drain, done)).await
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

    /// Notes that a connection is about to come to `bump` from the bump `was`, or from plain.
    pub fn enter(&self, bump: BumpId, tuple: FlowKey, was: Option<BumpId>) -> Result<(), Gone> {
        self.send(Command::Enter { bump, tuple, was })
    }

    /// Has this host's kernel say by `bump` where a connection stands.
    pub fn solicit(&self, bump: BumpId, tuple: FlowKey) -> Result<(), Gone> {
        self.send(Command::Solicit { bump, tuple })
    }

    /// Name `theirs` that the peer gives the connection `ours`; both as this host sends.
    pub fn match_names(&self, peer: usize, ours: FlowKey, theirs: FlowKey) -> Result<(), Gone> {
        self.send(Command::Match { peer, ours, theirs })
    }

    /// The connection `ours` of the peer is over, and its name with it.
    pub fn forget_match(&self, peer: usize, ours: FlowKey) -> Result<(), Gone> {
        self.send(Command::ForgetMatch { peer, ours })
    }

    /// State of everything but the connections.
    pub async fn snapshot(&self) -> Result<Snapshot, Gone> {
        self.ask(Command::Snapshot).await
    }

    /// All connections on bumps, and the moment.
    pub async fn conns(&self) -> Result<(Time, Vec<ConnSnapshot>), Gone> {
        self.ask(Command::Conns).await
    }

    /// Connections among these that were seen on `bump`, as [`is_seen`](dibs_core::Node::is_seen) says.
    pub async fn seen(&self, bump: BumpId, tuples: Vec<FlowKey>) -> Result<Vec<FlowKey>, Gone> {
        self.ask(|done| Command::Seen { bump, tuples, done }).await
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

/// Notices that wait for the main thread, at most. More wait in the node: see `dibs_core::node::Event`.
const NOTICES: usize = 256;

/// What the data path tells the main thread.
pub(crate) enum Notice {
    /// An event of the node, but for messages.
    Node(Event),
    /// A message of a peer's daemon; none: bytes that are none.
    Message {
        /// The peer.
        peer: usize,
        /// Connections in it have the names that this host gives them.
        message: Option<Message>,
    },
    /// A TUN cannot be read any more.
    TunLost {
        /// Its bump.
        bump: BumpId,
        /// The device, to be closed where that does not stop packets.
        tun: Box<Tun>,
        /// What the system said.
        error: io::Error,
    },
}

/// The data path's end.
pub(super) struct Teller {
    notices: mpsc::Sender<Notice>,
    /// Something found no room.
    held: Arc<AtomicBool>,
}

/// The main thread's end.
pub(crate) struct Notices {
    notices: mpsc::Receiver<Notice>,
    held: Arc<AtomicBool>,
    /// Of the data path.
    waker: Waker,
}

pub(super) fn notice_channel(waker: Waker) -> (Teller, Notices) {
    let (notices, told) = mpsc::channel(NOTICES);
    let held = Arc::new(AtomicBool::new(false));
    let teller = Teller {
        notices,
        held: Arc::clone(&held),
    };
    let notices = Notices {
        notices: told,
        held,
        waker,
    };
    (teller, notices)
}

impl Teller {
    /// Whether there is room for a notice. If not, the data path is woken once there is.
    pub(super) fn has_room(&self) -> bool {
        let has_room = || self.notices.capacity() > 0;
        has_room() || {
            self.held.store(true, Ordering::SeqCst);
            // What was taken before that woke nobody.
            has_room()
        }
    }

    /// Sends a notice for which there [is room](Self::has_room).
    pub(super) fn tell(&self, notice: Notice) {
        // Nobody else sends; without the main thread nobody is to be told.
        let _ = self.notices.try_send(notice);
    }
}

impl Notices {
    /// The next notice; none once the data path has ended.
    pub(crate) async fn next(&mut self) -> Option<Notice> {
        let notice = self.notices.recv().await;
        if self.held.swap(false, Ordering::SeqCst) {
            self.waker.wake();
        }
        notice
    }
}

/// What is answered of each thing that a request names.
pub(crate) type Outcomes = Vec<(Outcome, u64)>;

/// Sends requests, and keeps who waits for their answers. Commands: [`ask`](Self::ask) and
/// [`answer`](Self::answer); inputs: [`count_malformed`](Self::count_malformed) and [`handle_answer`](Self::handle_answer).
pub(crate) struct Rpc {
    driver: Driver,
    waiting: RefCell<HashMap<u32, Waiting>>,
    next_request: Cell<u32>,
    next_sequence: Cell<u64>,
    /// Messages that are none.
    malformed: Cell<u64>,
    /// Answers for which their peer's messages do not make room.
    dropped: Cell<u64>,
}

/// Who waits for a peer's answer.
struct Waiting {
    peer: usize,
    answer: oneshot::Sender<Outcomes>,
}

impl From<Gone> for Unanswered {
    fn from(_: Gone) -> Self {
        Self::Ended
    }
}

impl Rpc {
    /// Requests are numbered from `first`.
    pub(crate) fn new(driver: Driver, first: u32) -> Self {
        Self {
            driver,
            waiting: RefCell::default(),
            next_request: Cell::new(first),
            next_sequence: Cell::new(1),
            malformed: Cell::default(),
            dropped: Cell::default(),
        }
    }

    /// Asks a peer's daemon, and waits for the answer.
    pub(crate) async fn ask(&self, peer: usize, body: Body) -> Result<Outcomes, Unanswered> {
        self.ask_within(ANSWER_TIMEOUT, peer, body).await
    }

    /// The same; the peer has this time.
    pub(crate) async fn ask_within(
        &self,
        patience: Duration,
        peer: usize,
        body: Body,
    ) -> Result<Outcomes, Unanswered> {
        let request = self.next_request.get();
        self.next_request.set(request.wrapping_add(1));
        let (answer, answered) = oneshot::channel();
        let waiting = Waiting { peer, answer };
        self.waiting.borrow_mut().insert(request, waiting);
        let asked = async {
            let expires = body.expires(patience);
            self.post(peer, Message { request, body }, expires).await?;
            match tokio::time::timeout(patience, answered).await {
                Ok(Ok(outcomes)) => Ok(outcomes),
                _ => Err(Unanswered::Silent),
            }
        };
        let answer = asked.await;
        self.waiting.borrow_mut().remove(&request);
        answer
    }

    /// The sequence of the next WANT or SILENT.
    pub(crate) fn next_sequence(&self) -> u64 {
        let next = self.next_sequence.get();
        self.next_sequence.replace(next + 1)
    }

    /// Answers a request of a peer's daemon.
    pub(crate) async fn answer(&self, peer: usize, answer: Message) {
        if let Err(error) = self.post(peer, answer, None).await {
            if error == Unanswered::Full {
                self.dropped.update(|count| count + 1);
            }
            tracing::debug!(peer, "no answer sent: {error}");
        }
    }

    async fn post(
        &self,
        peer: usize,
        message: Message,
        patience: Option<Duration>,
    ) -> Result<(), Unanswered> {
        let sent = self.driver.send_control(peer, message, patience).await?;
        sent.map_err(Unanswered::from)
    }

    /// A peer's daemon sent bytes that are no message.
    pub(crate) fn count_malformed(&self, peer: usize) {
        self.malformed.update(|count| count + 1);
        tracing::debug!(peer, "message dropped: malformed");
    }

    /// Hands an answer to whoever asked.
    pub(crate) fn handle_answer(&self, peer: usize, request: u32, outcomes: Outcomes) {
        let mut waiting = self.waiting.borrow_mut();
        if waiting
            .get(&request)
            .is_some_and(|asked| asked.peer == peer)
        {
            let asked = waiting.remove(&request).expect("it was just seen");
            // Who asked may have given up.
            let _ = asked.answer.send(outcomes);
        }
    }

    /// For `status`, by name.
    pub(crate) fn counters(&self) -> [(&'static str, u64); 2] {
        [
            ("messages_malformed", self.malformed.get()),
            ("messages_dropped", self.dropped.get()),
        ]
    }
}
