//! Runs histories of the simulator: `dibs-sim [--seeds N] [--seed S] [--jobs J]`.

use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
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
    let (next, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    let histogram = Mutex::new(Histogram::default());
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs {
            scope.spawn(|| {
                let mine = work(&arguments, &next, &failed, began);
                let mut all = histogram.lock().expect("no thread panics with it");
                all.merge(&mine);
            });
        }
    });
    let failed = failed.into_inner();
    if arguments.count > 1 {
        let histogram = histogram.into_inner().expect("no thread panics with it");
        say(&format!("{histogram}"));
        let missing = histogram.missing();
        if !missing.is_empty() {
            say(&format!("never: {}", missing.join(", ")));
        }
    }
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

fn work(arguments: &Arguments, next: &AtomicU64, failed: &AtomicU64, began: Instant) -> Histogram {
    let mut histogram = Histogram::default();
    loop {
        let at = next.fetch_add(1, Ordering::Relaxed);
        if at >= arguments.count {
            return histogram;
        }
        match dibs_sim::run(arguments.first + at) {
            Ok(report) if arguments.count == 1 => say(&format!("{report:#?}")),
            Ok(report) => histogram.add(&report.coverage),
            Err(text) => {
                failed.fetch_add(1, Ordering::Relaxed);
                say(&format!("{text}\n"));
            }
        }
        if at > 0 && at.is_multiple_of(500) {
            eprintln!("{at} seeds in {:.1} s", began.elapsed().as_secs_f64());
        }
    }
}

/// Prints a line; whoever reads may have gone.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
