//! TUNs and sockets against the real kernel, in namespaces of their own: no root is needed, and
//! nothing of the host is touched. Speaks as much of libtest's command line as cargo-nextest needs.

mod allocations;
mod host;
mod tun;
mod udp;

use std::panic::catch_unwind;
use std::process::ExitCode;
use std::time::Instant;

macro_rules! tests {
    ($($module:ident::$test:ident,)*) => {
        &[$((concat!(stringify!($module), "::", stringify!($test)), $module::$test),)*]
    };
}

const TESTS: &[(&str, fn())] = tests![
    tun::is_noqueue_and_down_until_told,
    tun::carries_superpackets_ipv4,
    tun::carries_superpackets_ipv6,
    tun::without_offload_carries_the_same_ipv4,
    tun::without_offload_carries_the_same_ipv6,
    tun::refused_superpackets_are_not_lost,
    tun::errors_are_the_kernels,
    tun::does_not_allocate,
    udp::runs_arrive_as_runs_ipv4,
    udp::runs_arrive_as_runs_ipv6,
    udp::refused_runs_go_out_singly,
    udp::too_big_is_reported_with_its_size,
    udp::mark_and_options_are_set,
    udp::bound_interface_is_never_left,
    udp::answers_come_from_the_address_asked,
    udp::full_buffer_keeps_the_rest,
    udp::overflow_is_counted,
    udp::refused_port_is_no_error,
    udp::open_names_what_failed,
    udp::does_not_allocate,
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    if has("--list") {
        if !has("--ignored") {
            TESTS.iter().for_each(|(name, _)| println!("{name}: test"));
        }
        return ExitCode::SUCCESS;
    }
    let filters: Vec<_> = arguments
        .iter()
        .filter(|word| !word.starts_with('-'))
        .collect();
    let chosen = |name: &str| match filters.as_slice() {
        [] => true,
        some if has("--exact") => some.iter().any(|filter| *filter == name),
        some => some.iter().any(|filter| name.contains(filter.as_str())),
    };
    host::enter_user_namespace();
    let mut failed = Vec::new();
    for (name, test) in TESTS.iter().filter(|(name, _)| chosen(name)) {
        let start = Instant::now();
        let verdict = if catch_unwind(test).is_ok() {
            "ok"
        } else {
            "FAILED"
        };
        println!("test {name} ... {verdict} ({:.2?})", start.elapsed());
        if verdict != "ok" {
            failed.push(*name);
        }
    }
    if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        fail(&failed)
    }
}

fn fail(failed: &[&str]) -> ExitCode {
    eprintln!("failed: {}", failed.join(", "));
    ExitCode::FAILURE
}
