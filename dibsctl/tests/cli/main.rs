//! The real binary, against daemons made for the purpose.

mod daemon;
mod eavesdrop;
mod init;
mod offline;
mod online;
mod paths;

use std::io::Write;
use std::process::{Command, Output, Stdio};

/// What a run left behind.
struct Run {
    code: i32,
    out: String,
    err: String,
}

impl Run {
    fn of(output: Output) -> Self {
        Run {
            code: output.status.code().expect("ended by itself"),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Its output, having done what it should without a word on stderr.
    #[track_caller]
    fn good(self) -> String {
        assert_eq!((self.code, self.err.as_str()), (0, ""), "{}", self.out);
        self.out
    }

    /// Its one sentence, having failed without output.
    #[track_caller]
    fn failed(self) -> String {
        assert_eq!((self.code, self.out.as_str()), (1, ""), "{}", self.err);
        let sentence = self.err.strip_prefix("dibsctl: ").expect("says who speaks");
        assert_eq!(sentence.lines().count(), 1, "{sentence}");
        sentence.trim_end().to_owned()
    }
}

fn dibsctl(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dibsctl"));
    command.args(args).stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> Run {
    Run::of(dibsctl(args).output().unwrap())
}

fn run_with_input(args: &[&str], input: &[u8]) -> Run {
    let mut command = dibsctl(args);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    Run::of(child.wait_with_output().unwrap())
}
