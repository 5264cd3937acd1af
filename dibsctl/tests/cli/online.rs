//! Commands that the daemon answers.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;

use dibs_control::{
    BumpInfo, Changed, ErrorKind, Event, Failure, Match, NewRule, PathInfo, Reply, Request,
    Selector, encode_reply,
};
use serde_json::Value;

use crate::daemon::{Daemon, bump, changed, conn, path, peer, rule, status};
use crate::{dibsctl, run};

#[track_caller]
fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[track_caller]
fn has_keys(value: &Value, keys: &str) {
    for key in keys.split_whitespace() {
        assert!(value.get(key).is_some(), "{key}: {value}");
    }
}

/// A listing, for people and for programs: an array whose elements have these keys.
#[track_caller]
fn listing(args: &[&str], request: Request, reply: Reply, empty: Reply, human: &str, keys: &str) {
    let (run, asked) = Daemon::answering(Ok(reply.clone())).run(args);
    assert_eq!(asked, request);
    assert_eq!(run.good(), human);

    let with_json = [args, &["--json"]].concat();
    let (run, _) = Daemon::answering(Ok(reply)).run(&with_json);
    let list = json(&run.good());
    assert_eq!(list.as_array().unwrap().len(), 1);
    has_keys(&list[0], keys);

    let (run, _) = Daemon::answering(Ok(empty.clone())).run(&with_json);
    assert_eq!(json(&run.good()), Value::Array(Vec::new()));
    let (run, _) = Daemon::answering(Ok(empty)).run(args);
    assert!(run.good().starts_with("no "));
}

#[test]
fn peer_list() {
    let out = listing_of(&["peer", "list"], Reply::Peers(vec![peer()]));
    assert!(out.starts_with("PEER    STATE        "), "{out}");
    listing(
        &["peer", "list"],
        Request::PeerList,
        Reply::Peers(vec![peer()]),
        Reply::Peers(Vec::new()),
        &out,
        "name state public_key addresses since bytes_sent bytes_received connections reason",
    );
    let list = json(&listing_of(
        &["--json", "peer", "list"],
        Reply::Peers(vec![peer()]),
    ));
    assert_eq!(list[0]["state"], "established");
}

fn listing_of(args: &[&str], reply: Reply) -> String {
    Daemon::answering(Ok(reply)).run(args).0.good()
}

#[test]
fn path_list() {
    listing(
        &["path", "list"],
        Request::PathList,
        Reply::Paths(vec![path()]),
        Reply::Paths(Vec::new()),
        "PATH  PEER    TRUST    ROLE     STATE  REMOTE            RTT   LOSS   SENT  RECEIVED  WINDOW  \
         IN FLIGHT   MTU  NOTE\n\
         eth   server  trusted  primary  up     10.0.1.2:5300  1.5 ms  0.1 %  2 KiB       0 B  64 KiB        \
         0 B  1452  preferred; carries all of the trusted share\n",
        "name peer trust state srtt_us min_rtt_us rttvar_us loss lost bytes_sent bytes_received \
         preferred mtu cwnd in_flight pacing_rate gso remote reason \
         role rate_limit volume volume_used scheduler unused",
    );
    let list = json(&listing_of(
        &["path", "list", "--json"],
        Reply::Paths(vec![path()]),
    ));
    assert_eq!(
        (&list[0]["trust"], &list[0]["srtt_us"]),
        (&"trusted".into(), &1500.into())
    );
}

#[test]
fn bump_list() {
    listing(
        &["bump", "list"],
        Request::BumpList,
        Reply::Bumps(vec![bump()]),
        Reply::Bumps(Vec::new()),
        "BUMP      KIND      CONNECTIONS  NOTE\nscramble  scramble            1  default\n",
        "name kind device default connections answers reason",
    );
}

#[test]
fn a_device_by_which_nothing_comes_back_is_listed_as_such() {
    let device = |name: &str, answers| BumpInfo {
        name: name.to_owned(),
        kind: "device".to_owned(),
        device: Some("tun9".to_owned()),
        default: false,
        answers,
        ..bump()
    };
    let bumps = vec![
        device("vpn", Some(false)),
        device("other", Some(true)),
        device("new", None),
    ];
    let out = listing_of(&["bump", "list"], Reply::Bumps(bumps));
    let of = |name: &str| out.lines().find(|line| line.starts_with(name)).unwrap();
    assert!(of("vpn").ends_with("nothing comes back over it"), "{out}");
    assert!(
        of("other").ends_with("something comes back over it"),
        "{out}"
    );
    assert!(!of("new").contains("by it"), "{out}");
}

#[test]
fn rule_list() {
    listing(
        &["rule", "list"],
        Request::RuleList,
        Reply::Rules(vec![rule()]),
        Reply::Rules(Vec::new()),
        "ID  BUMP      SELECTOR  MADE BY\n 3  scramble  dport 80  dibsctl\n",
        "id bump origin selector scheduler",
    );
}

#[test]
fn conn_list() {
    let out = listing_of(&["conn", "list"], Reply::Conns(vec![conn()]));
    for part in [
        "10.0.1.1:40000",
        "10.0.1.2:80",
        "scramble",
        "3 MiB",
        "eth 1 MiB/0 B, wlan 2 MiB/0 B",
    ] {
        assert!(out.contains(part), "{part}: {out}");
    }
    assert!(
        !out.contains('\u{1b}'),
        "a process's name commands the terminal: {out:?}"
    );
    let list = json(&listing_of(
        &["conn", "list", "--json"],
        Reply::Conns(vec![conn()]),
    ));
    has_keys(
        &list[0],
        "id peer local remote bump process pid uid since bytes_sent bytes_received \
         retransmissions paths",
    );
    has_keys(&list[0]["paths"][1], "name bytes_sent bytes_received");
    assert_eq!(list[0]["local"], "10.0.1.1:40000");
}

#[test]
fn status_at_a_glance() {
    let mut seen = status();
    seen.paths[0].pacing_rate = Some(5_000_000);
    seen.paths.push(PathInfo {
        name: "wlan".to_owned(),
        unused: Some("it is a backup, and other paths work".to_owned()),
        reason: None,
        ..path()
    });
    let out = listing_of(&["status"], Reply::Status(seen));
    for part in [
        "dibsd 0.1.0, pid 99, up 3m12s, integrity on\n",
        "kill switch failed: set up the table: no\n",
        "warning: integrity is a fine thing\n",
        "5 connections to peers, 1 on a bump\n",
        "1 of 2 paths to server used, paced at 40 Mbit/s in all; \
         not wlan: it is a backup, and other paths work\n",
        "server  established",
        "eth   server  trusted  primary  up",
        "COUNTER   VALUE\nreplayed      4\n",
    ] {
        assert!(out.contains(part), "{part}: {out}");
    }
    assert!(!out.contains("silent"), "{out}");
    let object = json(&listing_of(&["--json", "status"], Reply::Status(status())));
    has_keys(&object["backstop"], "state reason");
    has_keys(
        &object,
        "version pid uptime integrity warnings peers paths bumps connections counters backstop",
    );
}

#[test]
fn selectors_are_asked_as_given() {
    let wanted = |wanted| Selector::Match(wanted);
    for (args, selector) in [
        (&["--all"][..], Selector::All),
        (&["--conn", "7"], Selector::Conn(7)),
        (
            &["--dport", "80"],
            wanted(Match {
                dport: Some(80),
                ..Match::default()
            }),
        ),
        (
            &[
                "--sport", "1", "--uid", "0", "--pid", "9", "--peer", "server",
            ],
            wanted(Match {
                sport: Some(1),
                uid: Some(0),
                pid: Some(9),
                peer: Some("server".to_owned()),
                ..Match::default()
            }),
        ),
        (
            &["--dst", "10.0.1.2", "--src", "fd00::/64"],
            wanted(Match {
                dst: Some("10.0.1.2/32".parse().unwrap()),
                src: Some("fd00::/64".parse().unwrap()),
                ..Match::default()
            }),
        ),
    ] {
        let daemon = Daemon::answering(Ok(Reply::Changed(changed())));
        let (run, asked) = daemon.run(&[&["enable"], args].concat());
        assert_eq!(
            (run.code, asked),
            (
                0,
                Request::Enable {
                    selector: selector.clone(),
                    bump: None
                }
            )
        );
        let daemon = Daemon::answering(Ok(Reply::Changed(changed())));
        let (run, asked) = daemon.run(&[&["disable"], args].concat());
        let force = false;
        let expected = Request::Disable { selector, force };
        assert_eq!((run.code, asked), (1, expected), "one was skipped");
        assert!(run.err.contains("did not move: "), "{}", run.err);
        let skipped = Vec::new();
        let all = Changed {
            skipped,
            ..changed()
        };
        let args = [&["disable"], args, &["--force"]].concat();
        let (run, asked) = Daemon::answering(Ok(Reply::Changed(all))).run(&args);
        assert!(
            matches!(asked, Request::Disable { force: true, .. }),
            "{asked:?}"
        );
        assert_eq!(run.code, 0, "{}", run.err);
    }
}

#[test]
fn enable_says_which_and_how_many() {
    let reply = || Ok(Reply::Changed(changed()));
    let (run, asked) = Daemon::answering(reply()).run(&["enable", "--all", "--bump", "scramble"]);
    let bump = Some("scramble".to_owned());
    assert_eq!(
        asked,
        Request::Enable {
            selector: Selector::All,
            bump
        }
    );
    assert!(
        run.out.starts_with("1 connection now on scramble\n"),
        "{}",
        run.out
    );
    assert!(run.out.contains("10.0.1.1:40000"), "{}", run.out);
    let skipped = "skipped 8: 10.0.1.1:40001 to 10.0.1.2:80: its socket is bound to a device\n";
    assert!(run.out.ends_with(skipped), "{}", run.out);
    assert_eq!(
        (run.code, run.err.as_str()),
        (0, "warning: scramble: text can be recovered\n")
    );

    let mut three = changed();
    three.skipped = vec![three.skipped[0].clone(); 3];
    three.skipped[1].reason = "its peer is away".to_owned();
    let daemon = Daemon::answering(Ok(Reply::Changed(three)));
    let (run, _) = daemon.run(&["enable", "--all", "--bump", "scramble"]);
    let conn = "8: 10.0.1.1:40001 to 10.0.1.2:80";
    let skipped = format!(
        "skipped 2 connections: its socket is bound to a device\n  {conn}\n  {conn}\n\
         skipped {conn}: its peer is away\n"
    );
    assert!(run.out.ends_with(&skipped), "{}", run.out);

    let (run, _) = Daemon::answering(reply()).run(&["--json", "enable", "--all"]);
    let object = json(&run.good());
    has_keys(&object, "bump connections skipped warnings");
    has_keys(&object["skipped"][0], "id local remote reason");
}

#[test]
fn to_skip_all_is_to_fail() {
    let reply = Changed {
        connections: Vec::new(),
        ..changed()
    };
    let (run, _) = Daemon::answering(Ok(Reply::Changed(reply))).run(&["enable", "--conn", "8"]);
    assert_eq!(run.code, 1);
    let sentence = "dibsctl: none of 1 connection moved: its socket is bound to a device\n";
    assert!(run.err.ends_with(sentence), "{}", run.err);
}

#[test]
fn rules_that_gave_way_are_named() {
    let displaced = dibs_control::RuleInfo {
        id: 2,
        require: true,
        selector: [("uid".to_owned(), "1000".to_owned())].into(),
        ..rule()
    };
    let made = dibs_control::RuleMade {
        rule: rule(),
        displaced: vec![displaced],
        warnings: Vec::new(),
    };
    let args = ["rule", "add", "--dport", "80", "--bump", "scramble"];
    let reply = || Ok(Reply::Rule(made.clone()));
    let (run, _) = Daemon::answering(reply()).run(&args);
    assert_eq!(
        run.good(),
        "rule 3: dport 80 -> scramble\n\
         rule 2 contradicted it and was deleted: uid 1000 -> scramble (required)\n"
    );
    let (run, _) = Daemon::answering(reply()).run(&[&args[..], &["--json"]].concat());
    let made = json(&run.good());
    has_keys(&made, "id bump origin selector displaced");
    assert_eq!(
        (&made["id"], &made["displaced"][0]["id"]),
        (&3.into(), &2.into())
    );
}

#[test]
fn a_new_rule_tells_what_is_in_its_way() {
    let made = dibs_control::RuleMade {
        rule: rule(),
        displaced: Vec::new(),
        warnings: vec!["port 80 gets no answer".to_owned()],
    };
    let args = ["rule", "add", "--dport", "80", "--bump", "scramble"];
    let (run, _) = Daemon::answering(Ok(Reply::Rule(made))).run(&args);
    assert_eq!(run.code, 0, "{}", run.err);
    assert_eq!(run.out, "rule 3: dport 80 -> scramble\n");
    assert_eq!(run.err, "warning: port 80 gets no answer\n");
}

#[test]
fn rules_are_made() {
    let selector = Selector::Match(Match {
        dport: Some(80),
        ..Match::default()
    });
    let request = Request::RuleAdd(NewRule::new(selector, "scramble"));
    let args = ["rule", "add", "--dport", "80", "--bump", "scramble"];
    let (run, asked) = Daemon::answering(Ok(Reply::Rule(rule().into()))).run(&args);
    assert_eq!(
        (run.good().as_str(), asked),
        ("rule 3: dport 80 -> scramble\n", request)
    );
    let (run, _) =
        Daemon::answering(Ok(Reply::Rule(rule().into()))).run(&[&args[..], &["--json"]].concat());
    assert_eq!(json(&run.good())["id"], 3);
    let required = dibs_control::RuleInfo {
        require: true,
        ..rule()
    };
    let args = [&args[..], &["--require"]].concat();
    let (run, asked) = Daemon::answering(Ok(Reply::Rule(required.into()))).run(&args);
    assert!(matches!(
        asked,
        Request::RuleAdd(NewRule { require: true, .. })
    ));
    assert_eq!(run.good(), "rule 3: dport 80 -> scramble (required)\n");
    let preferred = dibs_control::RuleInfo {
        prefer: true,
        active: false,
        ..rule()
    };
    let args = [
        "rule",
        "add",
        "--bump",
        "seal",
        "--prefer",
        "--priority",
        "-2",
        "--user",
        "root",
        "--gid",
        "7",
        "--match",
        "-m tos --tos 8",
        "--time",
        "08:00-18:00",
    ];
    let (run, asked) = Daemon::answering(Ok(Reply::Rule(preferred.into()))).run(&args);
    let wanted = NewRule {
        terms: [
            ("gid", "7"),
            ("time", "08:00-18:00"),
            ("match", "-m tos --tos 8"),
        ]
        .map(|(key, text)| (key, text.to_owned()))
        .into_iter()
        .collect(),
        prefer: true,
        priority: -2,
        ..NewRule::new(
            Selector::Match(Match {
                uid: Some(0),
                ..Match::default()
            }),
            "seal",
        )
    };
    assert_eq!(asked, Request::RuleAdd(wanted));
    assert_eq!(
        run.good(),
        "rule 3: dport 80 -> scramble (preferred), not now\n"
    );
    let (_, asked) = Daemon::answering(Ok(Reply::Rule(rule().into()))).run(&[
        "rule",
        "add",
        "--bump",
        "seal",
        "--interface",
        "eth0",
    ]);
    let Request::RuleAdd(asked) = asked else {
        panic!("{asked:?}")
    };
    assert_eq!(asked.selector, Selector::All);
}

#[test]
fn rules_are_deleted() {
    let (id, mut force) = (3, false);
    let kept = Vec::new();
    let mut gone = dibs_control::RuleGone { id, kept };
    let reply = Ok(Reply::RuleGone(gone.clone()));
    let (run, asked) = Daemon::answering(reply.clone()).run(&["rule", "del", "3"]);
    assert_eq!(
        (run.good().as_str(), asked),
        ("rule 3 is deleted\n", Request::RuleDel { id, force })
    );
    let (run, _) = Daemon::answering(reply).run(&["rule", "del", "3", "--json"]);
    assert_eq!(json(&run.good())["id"], 3);

    gone.kept = changed().skipped;
    let reply = Ok(Reply::RuleGone(gone));
    let (run, asked) = Daemon::answering(reply).run(&["rule", "del", "3", "--force"]);
    force = true;
    assert_eq!((run.code, asked), (1, Request::RuleDel { id, force }));
    let told = run.out.contains("\nkept ") && run.err.contains("did not move");
    assert!(told, "{} {}", run.out, run.err);
}

#[test]
fn a_rule_may_have_a_scheduler() {
    let scheduled = dibs_control::RuleInfo {
        scheduler: Some("redundant".to_owned()),
        ..rule()
    };
    let args = ["rule", "add", "--dport", "80", "--bump", "scramble"];
    let args = [&args[..], &["--scheduler", "redundant"]].concat();
    let reply = || Ok(Reply::Rule(scheduled.clone().into()));
    let (run, asked) = Daemon::answering(reply()).run(&args);
    let Request::RuleAdd(wanted) = asked else {
        panic!("{asked:?}")
    };
    assert_eq!(wanted.scheduler.as_deref(), Some("redundant"));
    assert_eq!(
        run.good(),
        "rule 3: dport 80 -> scramble, scheduler redundant\n"
    );
    let (run, _) = Daemon::answering(reply()).run(&[&args[..], &["--json"]].concat());
    assert_eq!(json(&run.good())["scheduler"], "redundant");
    let out = listing_of(&["rule", "list"], Reply::Rules(vec![scheduled.clone()]));
    assert!(out.ends_with("dport 80  redundant  dibsctl\n"), "{out}");
}

#[test]
fn cleanup_is_asked_of_a_running_daemon() {
    let (run, asked) = Daemon::answering(Ok(Reply::Done)).run(&["cleanup"]);
    assert_eq!(asked, Request::Cleanup);
    assert_eq!(run.good(), "nothing of dibs is left in the kernel\n");
    let (_, asked) = Daemon::answering(Ok(Reply::Done)).run(&["cleanup", "--force"]);
    assert_eq!(asked, Request::ForceCleanup);
}

fn event(text: &str) -> Event {
    Event {
        time: 86_400.25,
        kind: "path".to_owned(),
        text: text.to_owned(),
        fields: [("path".to_owned(), "eth".to_owned())].into(),
    }
}

fn events() -> String {
    [
        Reply::Following,
        Reply::Event(event("one")),
        Reply::Event(event("two\u{7}")),
    ]
    .map(|reply| encode_reply(&Ok(reply)))
    .concat()
}

#[test]
fn events_are_lines() {
    let (run, asked) = Daemon::saying(events()).run(&["events"]);
    assert_eq!(asked, Request::Events);
    let lines = "1970-01-02T00:00:00.250Z  one  path=eth\n\
                 1970-01-02T00:00:00.250Z  two\u{fffd}  path=eth\n";
    assert_eq!(
        (run.code, run.out.as_str()),
        (1, lines),
        "the daemon went away"
    );
    assert!(
        run.err
            .starts_with("dibsctl: dibsd closed the connection at"),
        "{}",
        run.err
    );

    let (run, _) = Daemon::saying(events()).run(&["events", "--json"]);
    let texts: Vec<_> = run
        .out
        .lines()
        .map(|line| json(line)["text"].clone())
        .collect();
    assert_eq!(texts, ["one", "two\u{7}"]);
}

/// Each event is there when it happens, not when a buffer is full; and a reader that has seen
/// enough ends it without a word.
#[test]
fn events_are_not_held_back_and_end_with_their_reader() {
    let (more, wait) = std::sync::mpsc::channel::<()>();
    let daemon = Daemon::serving(move |mut stream| {
        stream.write_all(events().as_bytes()).unwrap();
        wait.recv().unwrap();
        let line = encode_reply(&Ok(Reply::Event(event("late"))));
        while stream.write_all(line.as_bytes()).is_ok() {}
    });
    let mut child = dibsctl(&["events", "--socket", daemon.socket().to_str().unwrap()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    out.read_line(&mut line).unwrap();
    assert_eq!(line.lines().count(), 2);
    drop(out);
    more.send(()).unwrap();
    let mut err = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut err)
        .unwrap();
    assert_eq!((child.wait().unwrap().code(), err.as_str()), (Some(0), ""));
    daemon.request();
}

#[test]
fn any_time_can_be_shown() {
    for time in [f64::MAX, -1.0] {
        let event = Event {
            time,
            ..event("odd")
        };
        let text = encode_reply(&Ok(Reply::Following)) + &encode_reply(&Ok(Reply::Event(event)));
        let (run, _) = Daemon::saying(text).run(&["events"]);
        assert!(run.out.ends_with("odd  path=eth\n"), "{}", run.err);
    }
}

#[test]
fn refusals_are_one_sentence() {
    let failure = Failure::new(
        ErrorKind::NoSession,
        "no session with peer \"server\"\nyet\u{1b}",
    );
    let (run, _) = Daemon::answering(Err(failure)).run(&["enable", "--dport", "80"]);
    assert_eq!(
        run.failed(),
        "no session with peer \"server\"\u{fffd}yet\u{fffd}"
    );
}

#[test]
fn strangers_are_not_believed() {
    for text in [
        "SSH-2.0-OpenSSH\r\n",
        "{\"ok\":\"done\"}\n",
        "{\"ok\":{\"conns\":[{}]}}\n",
    ] {
        let (run, _) = Daemon::saying(text).run(&["conn", "list"]);
        let sentence = run.failed();
        assert!(
            sentence.contains("is answered by no dibsd of this version"),
            "{sentence}"
        );
    }
    let (run, _) = Daemon::saying("").run(&["conn", "list"]);
    assert!(run.failed().starts_with("dibsd closed the connection"));
}

#[test]
fn without_daemon_each_command_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("sock");
    for command in [
        "status",
        "conn list",
        "enable --all",
        "disable --all",
        "rule add --all --bump scramble",
        "rule list",
        "rule del 1",
        "path list",
        "path prefer wlan",
        "path unprefer",
        "path scheduler",
        "path role wlan backup",
        "path limit wlan --rate none",
        "path reset",
        "peer list",
        "bump list",
        "events",
    ] {
        let mut args = vec!["--socket", socket.to_str().unwrap()];
        args.extend(command.split(' '));
        let sentence = run(&args).failed();
        assert_eq!(
            sentence,
            format!(
                "dibsd is not running: nothing answers at {}; start it with sudo systemctl start dibsd (on a new host after sudo dibsctl init)",
                socket.display()
            ),
            "{command}"
        );
    }
}
