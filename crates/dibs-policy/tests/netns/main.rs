//! Steering against the real kernel, with both variants of iptables, in namespaces of their own: no root
//! is needed, and nothing of the host is touched. Speaks as much of libtest's command line as
//! cargo-nextest needs.

mod backstop;
mod cleanup;
mod connections;
mod lab;
mod packet;
mod plain;
mod reconcile;
mod rules;
mod traffic;

use std::process::ExitCode;
use std::time::Instant;

use dibs_policy::Variant;
use lab::Lab;

macro_rules! tests {
    ($($module:ident::$test:ident,)*) => {
        &[$((concat!(stringify!($module), "::", stringify!($test)), $module::$test),)*]
    };
}

type Test = (&'static str, fn(&Lab));

const TESTS: &[Test] = tests![
    reconcile::repeating_changes_nothing,
    reconcile::what_others_remove_is_put_back,
    reconcile::every_wish_can_follow_every_other,
    reconcile::a_missing_device_stays_closed,
    reconcile::the_watch_tells_of_changes,
    traffic::class_rules_send_new_connections_into_the_tun,
    traffic::own_datagrams_are_never_steered,
    traffic::what_comes_by_the_tun_is_followed,
    traffic::icmp_errors_go_with_their_connection,
    traffic::what_is_not_tcp_never_follows,
    traffic::this_hosts_own_addresses_are_no_peers,
    traffic::the_tun_delivers_only_what_peers_may_send,
    traffic::the_guard_drops_what_leaves_elsewhere,
    traffic::plain_packets_are_refused_by_the_tun,
    plain::a_locked_connection_takes_nothing_in_plain,
    plain::flags_of_no_connection_are_no_way_around,
    plain::what_is_required_never_leaves_in_plain,
    plain::what_is_required_is_never_taken_in_plain,
    plain::a_pinned_connection_outlives_its_entry,
    rules::each_match_means_what_it_says,
    rules::an_established_connection_follows_its_next_packet,
    rules::the_first_rule_that_fits_decides,
    rules::what_iptables_refuses_is_told_before_anything_is_installed,
    rules::the_backstop_knows_what_rules_name,
    rules::what_was_dropped_stays_counted,
    rules::what_the_kernel_refuses_takes_nothing_else_with_it,
    rules::a_preferred_bump_is_taken_where_there_is_a_session,
    connections::a_live_connection_moves_and_returns,
    connections::a_moved_connection_outlives_its_interface,
    connections::an_explicit_choice_outranks_class_rules,
    connections::events_and_sockets_tell_of_a_connection,
    backstop::a_range_of_ports_is_known_as_one,
    backstop::hundreds_of_rules_fit,
    backstop::thousands_of_connections_fit,
    backstop::what_another_program_owns_is_named_and_taken_once_it_is_free,
    backstop::to_look_changes_nothing,
    cleanup::leaves_what_others_made,
    cleanup::a_rule_of_the_users_like_ours_is_left_alone,
    cleanup::releases_the_bumps_that_go,
    cleanup::finds_what_another_variant_left,
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let variants = [("nft", Variant::Nft), ("legacy", Variant::Legacy)];
    let all: Vec<_> = variants
        .into_iter()
        .flat_map(|(prefix, variant)| {
            TESTS
                .iter()
                .map(move |(name, test)| (format!("{prefix}::{name}"), variant, *test))
        })
        .collect();
    if has("--list") {
        if !has("--ignored") {
            all.iter().for_each(|(name, ..)| println!("{name}: test"));
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
    lab::enter_namespaces();
    let mut failed = Vec::new();
    for (name, variant, test) in all.iter().filter(|(name, ..)| chosen(name)) {
        let start = Instant::now();
        let passed = lab::on_a_new_host(*variant, *test);
        let verdict = if passed { "ok" } else { "FAILED" };
        println!("test {name} ... {verdict} ({:.2?})", start.elapsed());
        if !passed {
            failed.push(name.as_str());
        }
    }
    if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        eprintln!("failed: {}", failed.join(", "));
        ExitCode::FAILURE
    }
}
