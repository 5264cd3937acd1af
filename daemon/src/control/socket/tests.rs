use std::cell::Cell;
use std::io::{ErrorKind as Io, Read as _, Write as _};
use std::os::unix::net::UnixStream as Stream;
use std::path::PathBuf;

use dibs_control::{decode_reply, encode_request};
use tempfile::TempDir;
use tokio::task::LocalSet;

use super::*;
use crate::control::Audience;
use crate::control::events::Events;

/// Longer than anything takes on a busy machine.
const LONG: Duration = Duration::from_secs(100);
/// For tests in which nobody is to be idle.
const NEVER: Duration = Duration::from_secs(1000);
/// For tests in which somebody is.
const SHORT: Duration = Duration::from_millis(50);

/// Answers all requests, and takes clients for whom it is told.
#[derive(Default)]
struct Fake {
    uid: Cell<u32>,
    answer: Cell<usize>,
    takes: Duration,
    events: Events,
    turned_away: TurnedAway,
}

impl Serves for Fake {
    fn caller(&self, _: u32) -> Caller {
        Caller {
            uid: self.uid.get(),
        }
    }

    async fn serve(&self, _: Caller, _: Request, _: &Progress) -> Result<Reply, Failure> {
        tokio::time::sleep(self.takes).await;
        match self.answer.get() {
            0 => Ok(Reply::Done),
            length => Err(Failure::new(ErrorKind::Failed, "x".repeat(length))),
        }
    }

    fn follow(&self) -> broadcast::Receiver<Told> {
        self.events.follow()
    }

    fn turned_away(&self) -> &TurnedAway {
        &self.turned_away
    }
}

impl Fake {
    fn tell(&self, audience: Audience, kind: &str, text: String) {
        self.events.tell_of(audience, kind, text, &[]);
    }
}

struct Socket {
    fake: Rc<Fake>,
    _directory: TempDir,
    path: PathBuf,
}

/// Has a socket served while `body` runs.
fn serving<F: Future<Output = ()>>(idle: Duration, body: impl FnOnce(Socket) -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("sock");
    let socket = Socket {
        fake: Rc::new(Fake {
            uid: Cell::new(1000),
            ..Fake::default()
        }),
        _directory: directory,
        path,
    };
    LocalSet::new().block_on(&runtime, async {
        let listener = bind(&socket.path).expect("a listener");
        tokio::task::spawn_local(serve_within(Rc::clone(&socket.fake), listener, idle));
        let body = tokio::time::timeout(LONG, body(socket));
        body.await.expect("it comes to its end");
    });
}

/// A client that has asked for something before anybody looks at it.
struct Client {
    stream: Stream,
    lines: LineBuffer,
}

impl Socket {
    fn connect(&self, uid: u32) -> Client {
        self.fake.uid.set(uid);
        let stream = Stream::connect(&self.path).expect("the socket is there");
        stream.set_nonblocking(true).expect("it can be");
        let lines = LineBuffer::new(1 << 20);
        Client { stream, lines }
    }

    fn asking(&self, uid: u32, request: &Request) -> Client {
        let mut client = self.connect(uid);
        client.ask(request);
        client
    }

    /// A client that is served.
    async fn served(&self, uid: u32) -> Option<Client> {
        let mut client = self.asking(uid, &Request::Status);
        (client.reply().await == Some(Ok(Reply::Done))).then_some(client)
    }

    async fn refused(&self, uid: u32) -> String {
        let mut client = self.asking(uid, &Request::Status);
        let Some(Err(why)) = client.reply().await else {
            panic!("uid {uid} is served");
        };
        assert_eq!(client.reply().await, None, "it is not closed");
        why.message
    }
}

impl Client {
    fn ask(&mut self, request: &Request) {
        let line = encode_request(request);
        self.stream.write_all(line.as_bytes()).expect("room");
    }

    /// The next answer; none: it was closed.
    async fn reply(&mut self) -> Option<Result<Reply, Failure>> {
        let mut piece = [0; 4096];
        loop {
            if let Some(line) = self.lines.next_line().expect("a line") {
                return Some(decode_reply(&line).expect("an answer"));
            }
            match self.stream.read(&mut piece) {
                Ok(0) => return None,
                Ok(len) => self.lines.extend(&piece[..len]),
                Err(error) if error.kind() == Io::WouldBlock => pause().await,
                // Closed with something unread.
                Err(error) if error.kind() == Io::ConnectionReset => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// A change that waits for programs of a busy host, and moves no connection meanwhile.
#[tokio::test(start_paused = true)]
async fn what_takes_longer_than_a_client_waits_is_told_to_go_on() {
    let fake = Fake {
        takes: 2 * dibs_control::TIMEOUT,
        ..Fake::default()
    };
    let (client, served) = UnixStream::pair().expect("a pair of sockets");
    let caller = Caller { uid: 0 };
    let reply = serve_telling(&fake, caller, Request::Status, &served).await;
    assert_eq!(reply, Ok(Reply::Done));
    let mut said = vec![0; 1 << 16];
    let length = client.try_read(&mut said).expect("something was said");
    let lines = said[..length].split_inclusive(|byte| *byte == b'\n');
    assert_eq!(lines.count(), 39, "one each second");
}

/// Lets the other side go on.
async fn pause() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

#[test]
fn each_user_has_so_many_clients_and_root_is_never_kept_out() {
    serving(NEVER, async |socket| {
        let mut clients = Vec::new();
        for uid in 1000..1008 {
            for _ in 0..CLIENTS_OF_UID {
                clients.push(socket.served(uid).await.expect("room"));
            }
            let why = socket.refused(uid).await;
            assert!(uid == 1007 || why.contains("has 8 clients"), "{why}");
        }
        assert_eq!(clients.len(), CLIENTS);
        assert_eq!(
            socket.refused(2000).await,
            "dibsd has 64 clients, which is the limit: try again later"
        );
        assert_eq!(socket.fake.turned_away.refused.get(), 9);
        let mut of_root = Vec::new();
        for _ in 0..3 {
            of_root.push(socket.served(0).await.expect("root is served"));
        }
        // Those that are there already are served all the same.
        for client in &mut clients {
            client.ask(&Request::Status);
            assert_eq!(client.reply().await, Some(Ok(Reply::Done)));
        }
        // Who goes makes room.
        clients.pop();
        while socket.served(2000).await.is_none() {
            pause().await;
        }
    });
}

#[test]
fn who_asks_nothing_is_let_go_and_who_follows_the_events_stays() {
    serving(SHORT, async |socket| {
        let mut follower = socket.asking(1000, &Request::Events);
        assert_eq!(follower.reply().await, Some(Ok(Reply::Following)));
        let mut idle = socket.connect(1000);
        let Some(Err(why)) = idle.reply().await else {
            panic!("it was not told");
        };
        assert_eq!(why.message, "nothing was asked within 0.05 s");
        assert_eq!(idle.reply().await, None, "it is not closed");
        // Nor does it help to say little at a time.
        let mut slow = socket.connect(1000);
        while slow.stream.write_all(b"{").is_ok() {
            pause().await;
        }
        let Some(Err(why)) = slow.reply().await else {
            panic!("it was not told");
        };
        assert!(why.message.starts_with("nothing was asked"), "{why}");
        assert_eq!(socket.fake.turned_away.idle.get(), 2);
        socket.fake.tell(Audience::All, "path", "news".to_owned());
        let Some(Ok(Reply::Event(event))) = follower.reply().await else {
            panic!("it follows no more");
        };
        assert_eq!(event.text, "news");
    });
}

#[test]
fn who_does_not_read_is_let_go() {
    serving(SHORT, async |socket| {
        let gone = |count: u64| {
            let fake = Rc::clone(&socket.fake);
            move || fake.turned_away.idle.get() >= count
        };
        socket.fake.answer.set(8 << 20);
        let asking = socket.asking(1000, &Request::Status);
        let is_gone = gone(1);
        while !is_gone() {
            pause().await;
        }
        let mut following = socket.asking(1000, &Request::Events);
        assert_eq!(following.reply().await, Some(Ok(Reply::Following)));
        let is_gone = gone(2);
        while !is_gone() {
            let text = "x".repeat(64 << 10);
            socket.fake.tell(Audience::All, "path", text);
            pause().await;
        }
        drop((asking, following));
    });
}

#[test]
fn events_are_for_those_whom_they_concern() {
    serving(NEVER, async |socket| {
        let mut followers = Vec::new();
        for uid in [0, 1000, 1001] {
            let mut follower = socket.asking(uid, &Request::Events);
            assert_eq!(follower.reply().await, Some(Ok(Reply::Following)));
            followers.push(follower);
        }
        for (kind, audience) in [
            ("root", Audience::Root),
            ("user", Audience::of(Some(1000))),
            ("part", Audience::UserAlone(1001)),
            ("passes", Audience::of(None)),
            ("own", Audience::of(Some(0))),
            ("all", Audience::All),
        ] {
            socket.fake.tell(audience, kind, String::new());
        }
        let expected: [&[&str]; 3] = [
            &["root", "user", "passes", "own", "all"],
            &["user", "all"],
            &["part", "all"],
        ];
        for (follower, expected) in followers.iter_mut().zip(expected) {
            for kind in expected {
                let Some(Ok(Reply::Event(event))) = follower.reply().await else {
                    panic!("it follows no more");
                };
                assert_eq!(event.kind, *kind);
            }
        }
    });
}
