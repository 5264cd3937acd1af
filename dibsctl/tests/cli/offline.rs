//! Commands that need no daemon, and wrong command lines.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::{Run, dibsctl, run, run_with_input};

const GOOD: &str = "[daemon]\ndefault_bump = \"scramble\"\n[[path]]\nname = \"eth\"\n\
                    interface = \"eth*\"\ntrust = \"trusted\"\n";

#[test]
fn wrong_command_lines_are_usage() {
    for line in [
        "",
        "dance",
        "conn",
        "conn drop",
        "enable",
        "disable",
        "enable --dport 0",
        "enable --dport 65536",
        "enable --dport no-such-service",
        "enable --dst server",
        "enable --dst 10.0.0.0/33",
        "enable --all --dport 80",
        "enable --conn 1 --uid 0",
        "enable --conn 1 --all",
        "enable --all --pid 1",
        "enable --conn seven",
        "enable --all --bump",
        "disable --all --bump scramble",
        "rule add --dport 80",
        "rule add --bump scramble",
        "rule add --conn 1 --bump scramble",
        "rule add --pid 1 --bump scramble",
        "rule add --all --bump scramble --scheduler best",
        "rule del",
        "rule del x",
        "check",
        "completions",
        "completions cmd",
        "status --verbose",
    ] {
        let ended = run(&line.split_whitespace().collect::<Vec<_>>());
        assert_eq!((ended.code, ended.out.as_str()), (2, ""), "{line}");
        assert!(ended.err.contains("--help"), "{line}: {}", ended.err);
    }
}

#[test]
fn usage_says_what_to_write() {
    for (line, advice) in [
        ("", "dibsctl enable --dport 5432"),
        ("enable", "select connections, for example with --dport 22"),
        ("enable", "Usage: dibsctl enable SELECTOR"),
        ("rule add --bump seal", "or with --all"),
        ("rule add --bump seal", "Usage: dibsctl rule add SELECTOR"),
        ("enable --dport 80-90", "ranges stand in a [[rule]]"),
        (
            "rule add --conn 1 --bump seal",
            "a rule cannot select one connection",
        ),
        ("enable --dport no-such-service", "write the number"),
        ("path role wlan none", "off"),
        ("eavesdrop", "--path <NAME>"),
    ] {
        let ended = run(&line.split_whitespace().collect::<Vec<_>>());
        assert_eq!(ended.code, 2, "{line}");
        assert!(ended.err.contains(advice), "{line}: {}", ended.err);
    }
}

/// The manual has a page of each command, with what a reader looks for at the end.
#[test]
fn pages_of_the_manual() {
    let directory = tempfile::tempdir().unwrap();
    run(&["man", directory.path().to_str().unwrap()]).good();
    for page in [
        "dibsctl",
        "dibsctl-enable",
        "dibsctl-rule-add",
        "dibsctl-init",
    ] {
        let text = fs::read_to_string(directory.path().join(format!("{page}.1"))).unwrap();
        for section in ["EXAMPLES", "FILES", "\"EXIT STATUS\"", "\"SEE ALSO\""] {
            assert!(
                text.contains(&format!(".SH {section}\n")),
                "{page}, {section}: {text}"
            );
        }
    }
}

/// A rule is for connections to come, which have no number and no process yet.
#[test]
fn rules_offer_nothing_that_names_live_connections() {
    for (command, live) in [("enable", true), ("disable", true), ("rule add", false)] {
        let words: Vec<&str> = command.split(' ').chain(["--help"]).collect();
        let help = run(&words).good();
        assert!(help.contains("--dport") && help.contains("--all"), "{help}");
        for option in ["--conn", "--pid"] {
            assert_eq!(help.contains(option), live, "{command} {option}: {help}");
        }
    }
}

#[test]
fn help_and_version() {
    let help = run(&["--help"]).good();
    for command in [
        "status",
        "conn",
        "enable",
        "rule",
        "path",
        "check",
        "genkey",
        "completions",
    ] {
        assert!(
            help.contains(&format!("\n  {command} ")),
            "{command}: {help}"
        );
    }
    assert!(!help.contains("\n  man "), "{help}");
    assert_eq!(
        run(&["--version"]).good(),
        format!("dibsctl {}\n", env!("CARGO_PKG_VERSION"))
    );
}

#[test]
fn keys_belong_together() {
    let private = run(&["genkey"]).good();
    assert_eq!(private.len(), 45);
    let public = run_with_input(&["pubkey"], private.as_bytes()).good();
    assert_eq!(
        public
            .trim_end()
            .parse::<dibs_config::PublicKey>()
            .unwrap()
            .to_string()
            .len(),
        44
    );
    assert_ne!(run(&["genkey"]).good(), private);
    assert_ne!(run(&["genpsk"]).good(), run(&["genpsk"]).good());
    // RFC 7748, 6.1.
    let alice = b"dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=";
    let public = run_with_input(&["pubkey"], alice).good();
    assert_eq!(public, "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=\n");
}

#[test]
fn pubkey_takes_keys_only() {
    for input in [&b""[..], b"secret", &[b'A'; 4000], b"\xff\xff"] {
        let sentence = run_with_input(&["pubkey"], input).failed();
        assert!(
            sentence.contains("stdin") && !sentence.contains("secret"),
            "{sentence}"
        );
    }
}

#[test]
fn a_key_in_an_open_file_is_warned_of() {
    let dir = tempfile::tempdir().unwrap();
    for (mode, warned) in [(0o600, false), (0o644, true), (0o640, true)] {
        let path = dir.path().join(format!("{mode:o}"));
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&path)
            .unwrap();
        let output = dibsctl(&["genkey"]).stdout(file).output().unwrap();
        assert!(output.status.success());
        assert_eq!(!output.stderr.is_empty(), warned, "{mode:o}");
        assert_eq!(
            dibs_config::read_private_key(&path).is_ok(),
            !warned,
            "{mode:o}"
        );
    }
}

fn check(dir: &Path, text: &str, options: &[&str]) -> crate::Run {
    let file = dir.join("dibs.toml");
    fs::write(&file, text).unwrap();
    run(&[&["check", file.to_str().unwrap()], options].concat())
}

#[test]
fn check_tells_right_from_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("dibs.toml").display().to_string();

    let right = check(dir.path(), GOOD, &[]);
    assert_eq!(right.code, 0);
    assert_eq!(
        right.out,
        format!("{file} is valid: 1 path, 0 peers, 0 rules\n")
    );
    assert!(
        right
            .err
            .starts_with("warning: scramble: text can be recovered"),
        "{}",
        right.err
    );
    assert_eq!(right.err.lines().count(), 1);

    let wrong = check(dir.path(), &GOOD.replace("interface", "interfaces"), &[]);
    assert_eq!((wrong.code, wrong.out.as_str()), (1, ""));
    let expected = format!(
        "5 | interfaces = \"eth*\"\n  | ^^^^^^^^^^\n\
         dibsctl: {file}:5:1: unknown key \"interfaces\" in [[path]]; hint: did you mean \
         \"interface\"?\n"
    );
    assert_eq!(wrong.err, expected);

    let absent = check(dir.path(), &GOOD.replace("eth*", "absent0"), &[]);
    assert_eq!(absent.code, 0);
    let warned = "waits for an interface absent0: this host has none of that name now\n";
    assert!(absent.err.ends_with(warned), "{}", absent.err);

    let lone = check(dir.path(), &GOOD.replace("\"scramble\"", "\"share\""), &[]);
    assert_eq!(lone.code, 1);
    let why = ":2:16: the bump \"share\" needs 2 paths or more";
    assert!(lone.err.contains(why), "{}", lone.err);

    let sentence = run(&["check", "/nonexistent"]).failed();
    assert!(
        sentence.starts_with("/nonexistent: cannot be read"),
        "{sentence}"
    );
}

#[test]
fn check_tells_programs_too() {
    let dir = tempfile::tempdir().unwrap();
    let right = check(dir.path(), GOOD, &["--json"]).good();
    let right: Value = serde_json::from_str(&right).unwrap();
    assert_eq!(
        (&right["ok"], right["warnings"].as_array().unwrap().len()),
        (&true.into(), 1)
    );

    let wrong = check(
        dir.path(),
        &GOOD.replace("\"trusted\"", "\"trust\""),
        &["--json"],
    );
    let answer: Value = serde_json::from_str(&wrong.out).unwrap();
    assert_eq!((wrong.code, &answer["ok"]), (1, &false.into()));
    assert_eq!((&answer["line"], &answer["column"]), (&6.into(), &9.into()));
    assert_eq!(answer["hint"], "did you mean \"trusted\"?");
    assert!(
        wrong.err.starts_with("dibsctl: ") && wrong.err.lines().count() == 1,
        "{}",
        wrong.err
    );

    let missing = run(&["check", "/nonexistent", "--json"]);
    let answer: Value = serde_json::from_str(&missing.out).unwrap();
    assert_eq!((missing.code, &answer["line"]), (1, &Value::Null));
}

#[test]
fn completions_know_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let script = run(&["completions", shell]).good();
        assert!(
            script.contains("disable") && script.contains("dport"),
            "{shell}"
        );
    }
}

/// Commands that are programs of their own say what is missing, and the command line reaches them.
#[test]
fn commands_of_their_own_are_programs_beside_it() {
    let directory = tempfile::tempdir().unwrap();
    let alone = directory.path().join("dibsctl");
    // `cp` copies, not this process: another test's thread that forks meanwhile would inherit the open copy, and a
    // program that somebody has open for writing cannot be run.
    let copied = Command::new("cp")
        .args([Path::new(env!("CARGO_BIN_EXE_dibsctl")), &alone])
        .status();
    assert!(copied.unwrap().success());
    let run = |words: &[&str]| Run::of(Command::new(&alone).args(words).output().unwrap());
    for (words, program) in [
        (&["demo"][..], "dibs-demo"),
        (&["eavesdrop", "--path", "eth0"], "dibs-eavesdrop"),
    ] {
        let said = run(words).failed();
        let missing = alone.with_file_name(program);
        assert!(
            said.starts_with(&format!("{} does not exist", missing.display())),
            "{said}"
        );
        assert!(said.contains("package dibs"), "{said}");
    }
    let program = alone.with_file_name("dibs-eavesdrop");
    std::os::unix::fs::symlink("/bin/echo", &program).unwrap();
    let words = [
        "--socket",
        "eavesdrop",
        "eavesdrop",
        "--path",
        "eth0",
        "--json",
    ];
    assert_eq!(
        run(&words).good(),
        "--socket eavesdrop --path eth0 --json\n"
    );
}

#[test]
fn manual_pages() {
    let dir = tempfile::tempdir().unwrap();
    run(&["man", dir.path().to_str().unwrap()]).good();
    for page in ["dibsctl.1", "dibsctl-enable.1", "dibsctl-rule-add.1"] {
        let text = fs::read_to_string(dir.path().join(page)).unwrap();
        assert!(text.contains(".SH NAME"), "{page}");
    }
    assert!(
        run(&["man", "/nonexistent"])
            .failed()
            .starts_with("cannot write the manual")
    );
}

/// A reader that is gone, or a disk that is full.
#[test]
fn output_that_cannot_be_written() {
    for command in [
        &["genkey"][..],
        &["completions", "bash"],
        &["check", "FILE"],
    ] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("dibs.toml");
        fs::write(&file, GOOD.replace("\ndefault_bump = \"scramble\"", "")).unwrap();
        let args: Vec<_> = command
            .iter()
            .map(|arg| {
                if *arg == "FILE" {
                    file.to_str().unwrap()
                } else {
                    arg
                }
            })
            .collect();

        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = dibsctl(&args).stdout(writer).output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(
            (output.status.code(), err.as_str()),
            (Some(0), ""),
            "{args:?}"
        );

        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = dibsctl(&args).stdout(full).output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(err.contains("No space left"), "{err}");
    }
}

#[test]
fn doctor_names_what_is_wrong_with_the_file_and_fails() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("dibsd.toml");
    fs::write(&file, "[daemon]\nport = 0\n").unwrap();
    let file = file.to_str().unwrap();
    let socket = dir.path().join("none");
    let line = [
        "--socket",
        socket.to_str().unwrap(),
        "doctor",
        "--config",
        file,
    ];
    let ended = run(&line);
    assert_eq!(ended.code, 1, "{}", ended.out);
    assert!(
        ended.err.starts_with("dibsctl: ") && ended.err.contains("failed"),
        "{}",
        ended.err
    );
    let told = { ended.out.lines() }.find(|line| line.contains(&format!("config {file}")));
    let told = told.unwrap_or_else(|| panic!("{}", ended.out));
    assert!(
        told.starts_with("FAILED") && told.contains("port"),
        "{told}"
    );

    let ended = run(&[&line[..], &["--json"]].concat());
    assert_eq!(ended.code, 1, "{}", ended.out);
    let answer: Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!(answer["ok"], false, "{answer}");
    for check in answer["checks"].as_array().unwrap() {
        for key in ["check", "subject", "result", "found", "advice"] {
            assert!(check.get(key).is_some(), "{key}: {check}");
        }
        let to_do = check["result"] != "ok";
        assert_eq!(check["advice"].is_string(), to_do, "{check}");
    }
}
