//! The client against daemons that answer, and daemons that do not.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use dibs_control::{
    Changed, Client, ClientError, ErrorKind, Event, Failure, Match, NewRule, Reply, Request,
    RuleGone, Selector, decode_request, encode_reply,
};
use tempfile::TempDir;

/// A socket whose first connection is served by `serve` on a thread of its own.
struct Fake {
    dir: TempDir,
    thread: JoinHandle<()>,
}

impl Fake {
    fn new(serve: impl FnOnce(UnixStream) + Send + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("sock")).unwrap();
        let thread = std::thread::spawn(move || serve(listener.accept().unwrap().0));
        Fake { dir, thread }
    }

    /// Answers one request with that text, and closes.
    fn saying(text: impl Into<Vec<u8>>) -> Self {
        let text = text.into();
        Fake::new(move |mut stream| {
            read_line(&stream);
            // The client may have seen enough, and gone.
            let _ = stream.write_all(&text);
        })
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("sock")
    }

    fn client(&self) -> Client {
        Client::connect_timeout(&self.socket(), Duration::from_secs(120)).unwrap()
    }

    fn end(self) {
        self.thread.join().unwrap();
    }
}

fn read_line(stream: &UnixStream) -> String {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    line
}

fn event(text: &str) -> Event {
    Event {
        time: 1.5,
        kind: "path".to_owned(),
        text: text.to_owned(),
        fields: [].into(),
    }
}

#[test]
fn one_connection_carries_several_requests() {
    let fake = Fake::new(|mut stream| {
        let gone = RuleGone {
            id: 4,
            kept: Vec::new(),
        };
        let (id, force) = (4, true);
        for (expected, reply) in [
            (Request::RuleDel { id, force }, Reply::RuleGone(gone)),
            (Request::Cleanup, Reply::Done),
            (Request::ForceCleanup, Reply::Done),
        ] {
            assert_eq!(decode_request(&read_line(&stream)), Ok(expected));
            stream
                .write_all(encode_reply(&Ok(reply)).as_bytes())
                .unwrap();
        }
    });
    let mut client = fake.client();
    assert_eq!(client.delete_rule(4, true).unwrap().id, 4);
    client.cleanup(false).unwrap();
    client.cleanup(true).unwrap();
    fake.end();
}

#[test]
fn refusals_are_passed_on() {
    let failure = Failure::new(ErrorKind::NoSession, "no session with server");
    let fake = Fake::saying(encode_reply(&Err(failure)));
    let error = fake.client().enable(Selector::All, None).unwrap_err();
    assert!(matches!(&error, ClientError::Refused(f) if f.kind == ErrorKind::NoSession));
    assert_eq!(error.to_string(), "no session with server");
    fake.end();
}

#[test]
fn an_impossible_request_is_not_sent() {
    let fake = Fake::new(|stream| assert_eq!(read_line(&stream), ""));
    let mut client = fake.client();
    assert!(
        client
            .disable(Selector::Match(Match::default()), false)
            .is_err()
    );
    assert!(
        client
            .add_rule(NewRule::new(Selector::Conn(1), "scramble"))
            .is_err()
    );
    drop(client);
    fake.end();
}

#[test]
fn events_follow_in_pieces() {
    let fake = Fake::new(|mut stream| {
        read_line(&stream);
        let mut text = encode_reply(&Ok(Reply::Following));
        for number in ["one", "two"] {
            text += &encode_reply(&Ok(Reply::Event(event(number))));
        }
        for piece in text.as_bytes().chunks(7) {
            stream.write_all(piece).unwrap();
        }
    });
    let mut events = fake.client().events().unwrap();
    assert_eq!(events.next().unwrap().unwrap(), event("one"));
    assert_eq!(events.next().unwrap().unwrap(), event("two"));
    assert!(matches!(
        events.next(),
        Some(Err(ClientError::Closed { .. }))
    ));
    assert!(events.next().is_none());
    fake.end();
}

#[test]
fn no_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("sock");
    let not_running = |socket| {
        let error = Client::connect(socket).unwrap_err();
        assert!(matches!(error, ClientError::NotRunning { .. }), "{error}");
        assert!(
            error.to_string().contains(&socket.display().to_string()),
            "{error}"
        );
    };
    not_running(&socket);
    // A daemon that was killed leaves its socket behind.
    drop(UnixListener::bind(&socket).unwrap());
    not_running(&socket);
}

#[test]
fn closed_socket_permissions_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("sock");
    let _listener = UnixListener::bind(&socket).unwrap();
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o000)).unwrap();
    match Client::connect(&socket) {
        // Nothing is closed to root.
        Ok(_) => assert!(std::fs::read("/etc/shadow").is_ok()),
        Err(error) => assert!(matches!(error, ClientError::NoAccess { .. }), "{error}"),
    }
}

#[test]
fn a_silent_daemon_runs_into_the_timeout() {
    let (release, wait) = std::sync::mpsc::channel::<()>();
    let fake = Fake::new(move |stream| {
        wait.recv().unwrap();
        drop(stream);
    });
    let timeout = Duration::from_millis(50);
    let mut client = Client::connect_timeout(&fake.socket(), timeout).unwrap();
    let error = client.status().unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    release.send(()).unwrap();
    fake.end();
}

#[test]
fn a_daemon_that_tells_of_progress_has_longer() {
    static TOLD: AtomicU64 = AtomicU64::new(0);
    let timeout = Duration::from_secs(5);
    let fake = Fake::new(move |mut stream| {
        read_line(&stream);
        for done in 1..=6 {
            // All of them take longer than the client would wait for one answer, each far less: the passing of time is
            // what is tested.
            std::thread::sleep(timeout / 5);
            let progress = Reply::Progress { done, of: 6 };
            stream
                .write_all(encode_reply(&Ok(progress)).as_bytes())
                .unwrap();
        }
        let changed = Changed {
            bump: "plain".to_owned(),
            connections: Vec::new(),
            skipped: Vec::new(),
            warnings: Vec::new(),
        };
        let reply = encode_reply(&Ok(Reply::Changed(changed)));
        stream.write_all(reply.as_bytes()).unwrap();
    });
    let mut client = Client::connect_timeout(&fake.socket(), timeout).unwrap();
    client.on_progress(|done, of| {
        assert_eq!((TOLD.fetch_add(1, Ordering::Relaxed) + 1, 6), (done, of));
    });
    assert_eq!(client.disable(Selector::All, false).unwrap().bump, "plain");
    assert_eq!(TOLD.load(Ordering::Relaxed), 6);
    fake.end();
}

/// Each byte in time, the whole never: the timeout is for the answer, not for a read.
#[test]
fn a_trickling_daemon_runs_into_the_timeout() {
    let fake = Fake::new(|mut stream| {
        while stream.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let timeout = Duration::from_millis(100);
    let mut client = Client::connect_timeout(&fake.socket(), timeout).unwrap();
    assert!(matches!(
        client.status().unwrap_err(),
        ClientError::Timeout { .. }
    ));
    drop(client);
    fake.end();
}

/// A listener whose backlog is full and that never accepts.
#[test]
fn a_stopped_daemon_runs_into_the_timeout() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("sock");
    let listener =
        socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
    listener
        .bind(&socket2::SockAddr::unix(&socket).unwrap())
        .unwrap();
    listener.listen(0).unwrap();
    let timeout = Duration::from_millis(50);
    let connect = || Client::connect_timeout(&socket, timeout);
    let _first = connect().unwrap();
    let error = connect().unwrap_err();
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
}

#[test]
fn other_answers_are_not_believed() {
    for text in [
        &b"HTTP/1.1 400 Bad Request\r\n"[..],
        b"\n",
        b"{}\n",
        b"null\n",
        b"{\"ok\":null}\n",
        b"{\"ok\":{\"status\":{}}}\n",
        b"{\"ok\":\"done\"}\n",
        b"\xff\xfe\n",
        b"{\"ok\":\"done\",\"error\":null}\n",
    ] {
        let fake = Fake::saying(text);
        let error = fake.client().status().unwrap_err();
        assert!(matches!(error, ClientError::Garbage { .. }), "{error}");
        assert_eq!(error.to_string().lines().count(), 1, "{error}");
        fake.end();
    }
    let fake = Fake::saying("{\"ok\":\"do");
    assert!(matches!(
        fake.client().status().unwrap_err(),
        ClientError::Closed { .. }
    ));
    fake.end();
}

#[test]
fn an_endless_line_ends() {
    let fake = Fake::saying(vec![b'x'; dibs_control::MAX_REPLY + (1 << 20)]);
    assert!(matches!(
        fake.client().status().unwrap_err(),
        ClientError::Garbage { .. }
    ));
    fake.end();
}

#[test]
fn a_daemon_that_takes_nothing_may_still_say_why() {
    let why = Failure::new(ErrorKind::Refused, "uid 1000 has 8 clients already");
    let said = encode_reply(&Err(why.clone()));
    let (closed, wait) = std::sync::mpsc::channel();
    let fake = Fake::new(move |mut stream| {
        stream.write_all(said.as_bytes()).unwrap();
        drop(stream);
        closed.send(()).unwrap();
    });
    let mut client = fake.client();
    // Nothing can be sent any more.
    wait.recv().unwrap();
    match client.status() {
        Err(ClientError::Refused(failure)) => assert_eq!(failure, why),
        other => panic!("{other:?}"),
    }
    fake.end();
}
