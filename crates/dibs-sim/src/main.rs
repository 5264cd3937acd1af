//! Runs histories of the simulator: `dibs-sim [--seeds N] [--seed S] [--jobs J]`.

use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use dibs_sim::coverage::Histogram;

const USAGE: &str = "usage: dibs-sim [--seeds N] [--seed S] [--jobs J]
  --seeds N  run N seeds, from the one of --seed on (default 2000 from 0; 1 if --seed stands alone)
  --seed S   the first seed
  --jobs J   threads (default: one a processor)";

struct Arguments {
    first: u64,
    count: u64,
    jobs: usize,
}

fn arguments() -> Result<Arguments, String> {
    let (mut first, mut count) = (None, None);
    let mut jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || {
            let text = words.next().ok_or(format!("{word} needs a number"))?;
            text.parse::<u64>()
                .map_err(|e| format!("{word} {text}: {e}"))
        };
        match word.as_str() {
            "--seed" => first = Some(number()?),
            "--seeds" => count = Some(number()?),
            "--jobs" => jobs = number()?.max(1) as usize,
            _ => return Err(format!("{word} is not an option")),
        }
    }
    Ok(Arguments {
        first: first.unwrap_or(0),
        count: count.unwrap_or(if first.is_some() { 1 } else { 2000 }),
        jobs,
    })
}

fn main() -> ExitCode {
    if std::env::args().any(|word| word == "--help" || word == "-h") {
        println!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(fault) => {
            eprintln!("{fault}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let began = Instant::now();
    let failed = histories(&arguments);
    say(&format!(
        "{} seeds in {:.1} s, {failed} failed",
        arguments.count,
        began.elapsed().as_secs_f64()
    ));
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Runs each history, on as many threads as there are jobs; returns how many failed.
fn histories(arguments: &Arguments) -> u64 {
    let (next, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    let unkept = AtomicUsize::new(0);
    let (histogram, began) = (Mutex::new(Histogram::default()), Instant::now());
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= arguments.count {
                return;
            }
            match dibs_sim::run(arguments.first + at) {
                Ok(report) if arguments.count == 1 => say(&format!("{report:#?}")),
                Ok(report) => {
                    let mut histogram = histogram.lock().expect("no thread panics with it");
                    histogram.add(&report.coverage);
                    unkept.fetch_add(report.unkept, Ordering::Relaxed);
                }
                Err(text) => {
                    failed.fetch_add(1, Ordering::Relaxed);
                    say(&format!("{text}\n"));
                }
            }
            if at > 0 && at.is_multiple_of(500) {
                eprintln!("{at} seeds in {:.1} s", began.elapsed().as_secs_f64());
            }
        }
    };
    std::thread::scope(|scope| (0..arguments.jobs).for_each(|_| drop(scope.spawn(work))));
    if arguments.count > 1 {
        let histogram = histogram.into_inner().expect("no thread panicked with it");
        say(&format!("{histogram}"));
        say(&format!(
            "stayed on bumps where nothing kept them: {} connections",
            unkept.into_inner()
        ));
        let missing = histogram.missing();
        if !missing.is_empty() {
            say(&format!("never: {}", missing.join(", ")));
        }
    }
    failed.into_inner()
}

/// Prints a line; whoever reads may have gone.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
