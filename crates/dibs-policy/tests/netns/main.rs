//! Steering against the real kernel, with both variants of iptables, in namespaces of their own: no root
//! is needed, and nothing of the host is touched.

mod backstop;
mod both;
mod cleanup;
mod connections;
mod lab;
mod packet;
mod plain;
mod reconcile;
mod rules;
mod traffic;

/// Makes a test of each function, with each variant of iptables.
macro_rules! tests {
    ($($module:ident { $($test:ident,)* })*) => {
        mod nft {
            $(mod $module { $(
                #[test]
                fn $test() {
                    let test = crate::$module::$test;
                    dibs_netns::isolated(|| crate::lab::run(dibs_policy::Variant::Nft, test));
                }
            )* })*
        }

        mod legacy {
            $(mod $module { $(
                #[test]
                fn $test() {
                    let test = crate::$module::$test;
                    dibs_netns::isolated(|| crate::lab::run(dibs_policy::Variant::Legacy, test));
                }
            )* })*
        }
    };
}

tests! {
    reconcile {
        repeating_changes_nothing,
        what_others_remove_is_put_back,
        every_wish_can_follow_every_other,
        a_missing_device_stays_closed,
        the_watch_tells_of_changes,
    }
    both {
        what_iptables_marks_nftables_drops,
        both_guards_drop_the_same,
    }
    traffic {
        class_rules_send_new_connections_into_the_tun,
        what_has_the_own_mark_is_never_steered,
        what_comes_by_the_tun_is_followed,
        icmp_errors_go_with_their_connection,
        what_is_not_tcp_never_follows,
        this_hosts_own_addresses_are_no_peers,
        the_tun_delivers_only_what_peers_may_send,
        the_guard_drops_what_leaves_elsewhere,
        plain_packets_are_refused_by_the_tun,
    }
    plain {
        a_locked_connection_takes_nothing_in_plain,
        flags_of_no_connection_are_no_way_around,
        what_is_required_never_leaves_in_plain,
        what_is_required_is_never_taken_in_plain,
        a_pinned_connection_outlives_its_entry,
    }
    rules {
        each_match_means_what_it_says,
        an_established_connection_follows_its_next_packet,
        the_first_rule_that_fits_decides,
        what_iptables_refuses_is_told_before_anything_is_installed,
        the_backstop_knows_what_rules_name,
        what_was_dropped_stays_counted,
        what_the_kernel_refuses_takes_nothing_else_with_it,
        a_preferred_bump_is_taken_where_there_is_a_session,
    }
    connections {
        a_live_connection_moves_and_returns,
        a_moved_connection_outlives_its_interface,
        an_explicit_choice_outranks_class_rules,
        events_and_sockets_tell_of_a_connection,
    }
    backstop {
        a_range_of_ports_is_known_as_one,
        hundreds_of_rules_fit,
        thousands_of_connections_fit,
        what_another_program_owns_is_named_and_taken_once_it_is_free,
        to_look_changes_nothing,
    }
    cleanup {
        leaves_what_others_made,
        a_rule_of_the_users_like_ours_is_left_alone,
        releases_the_bumps_that_go,
        finds_what_another_variant_left,
    }
}
