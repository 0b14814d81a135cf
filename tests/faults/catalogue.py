"""Every fault that the design reckons with, and the tests that inject it.

`test_catalogue.py` keeps it true: each number is here, each test is there. What no test can inject on this kind of
machine says so and why. Most faults have several tests, on several stores; those are named that inject the fault
itself. What is promised about each stands in the tests, and the figures in the report of their run.
"""

from __future__ import annotations

from typing import NamedTuple

CONTRACT = "pglease/testing/contract.py"


class Fault(NamedTuple):
    """One of them.

    Attributes:
        what: what goes wrong.
        tests: who injects it, as `path::name`.
        lacks: what a machine would need for the rest of it, or why there is none.
    """

    what: str
    tests: tuple[str, ...] = ()
    lacks: str = ""


def _in(path: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{path}.py::test_{name}" for name in names)


def _contract(*names: str) -> tuple[str, ...]:
    return tuple(f"{CONTRACT}::test_{name}" for name in names)


JEPSEN = "tests/jepsen/nemeses.py::{}"

CATALOGUE: dict[int, Fault] = {
    # processes
    1: Fault("the holder is killed", _in("reports/test_renewal", "a_killed_holder_is_replaced_within_its_ttl")),
    2: Fault(
        "the holder is killed, hybrid", _in("hybrid/test_death", "a_killed_process_is_succeeded_long_before_its_ttl")
    ),
    3: Fault(
        "the holder is stopped and goes on",
        _in(
            "attacks/test_pauses",
            "a_process_that_slept_past_its_ttl_stops_before_it_does_anything_and_leaves_the_next_holder_alone",
        )
        + _in("fencing/test_pauses", "a_holder_that_was_stopped_in_its_body_is_refused_after_its_successor_wrote"),
    ),
    4: Fault(
        "a whole group is frozen",
        _in("faults/test_processes", "a_frozen_group_is_succeeded_and_knows_it_when_it_thaws"),
    ),
    5: Fault(
        "SIGTERM, with and without handlers",
        _in("attacks/test_ending", "a_process_that_is_ended_by_a_signal_keeps_its_lease_until_its_ttl")
        + _in("client/test_safety", "a_signal_ends_a_program_in_order_and_what_it_held_is_free"),
    ),
    6: Fault(
        "Ctrl-C in a call",
        _in("units/test_postgres_psycopg", "ctrl_c_in_mid_conversation_ends_it_and_its_connection_is_not_used_again")
        + _in("waiting/test_waits", "the_exception_of_a_signal_ends_a_wait_and_leaves_nothing"),
    ),
    7: Fault(
        "a normal exit with leases held, the server frozen",
        _in("attacks/test_ending", "a_normal_exit_releases", "exit_does_not_wait_for_a_frozen_server"),
    ),
    8: Fault(
        "an exit without a word, a segmentation fault, no memory",
        _in("faults/test_processes", "whatever_a_process_dies_of_its_name_is_free_after_its_ttl"),
    ),
    9: Fault(
        "a fork while holding",
        _in(
            "attacks/test_forks",
            "the_child_of_a_holder_holds_nothing_and_knows_why",
            "a_child_that_closes_its_client_leaves_the_parents_lease_and_connection_alone",
        ),
    ),
    10: Fault(
        "a fork while another thread has a lock of ours",
        _in("units/test_forks", "a_child_forked_while_every_lock_is_taken_is_not_stuck")
        + _in("attacks/test_forks", "a_fork_while_threads_are_busy_with_the_client_hangs_nobody"),
    ),
    11: Fault(
        "servers that fork their workers",
        _in("attacks/test_forks", "children_forked_at_once_each_lease_for_themselves_and_read_their_own_rows"),
    ),
    12: Fault(
        "descriptors in what a holder starts",
        _in("faults/test_processes", "what_a_holder_starts_inherits_none_of_its_connections")
        + _in("cli/test_run", "the_command_inherits_no_descriptor_of_ours"),
    ),
    13: Fault(
        "no more descriptors, threads or memory",
        _in("faults/test_processes", "a_process_that_may_open_nothing_more_keeps_what_it_has")
        + _in("units/test_watchdog", "an_interpreter_without_a_thread_to_spare_is_warned_and_goes_on")
        + _in("review/test_places", "a_stuck_call_is_cut_off_though_no_file_can_be_opened_any_more"),
    ),
    # threads and the interpreter
    14: Fault(
        "C code keeps the interpreter's lock",
        _in("faults/test_interpreters", "a_holder_whose_interpreter_stands_still_knows_at_once_that_it_lost"),
    ),
    15: Fault(
        "threads that compute",
        _in("faults/test_interpreters", "threads_that_compute_without_end_delay_no_renewal_for_long"),
    ),
    16: Fault(
        "the renewing thread is killed",
        _in("faults/test_interpreters", "a_renewer_that_is_killed_costs_at_most_its_leases_and_is_never_silent")
        + _in("reports/test_renewal", "a_defect_in_every_renewal_ends_in_a_loss_at_the_deadline"),
    ),
    17: Fault(
        "a callback raises",
        _in("attacks/test_callbacks", "a_callback_that_fails_is_logged_and_the_other_leases_live_on"),
    ),
    18: Fault("a callback blocks", _in("attacks/test_callbacks", "a_callback_that_takes_its_time_delays_no_renewal")),
    19: Fault(
        "a callback calls back",
        _in(
            "attacks/test_callbacks",
            "a_callback_that_releases_is_answered",
            "a_callback_that_closes_the_client_closes_it",
            "a_callback_that_acquires_again_has_a_lease_that_is_renewed",
        ),
    ),
    20: Fault(
        "logging raises",
        _in("faults/test_interpreters", "a_log_that_fails_stops_neither_renewals_nor_notices"),
    ),
    21: Fault(
        "asking while the interpreter goes down",
        _in("faults/test_interpreters", "asking_while_the_interpreter_goes_down_ends_in_an_answer_or_an_error"),
    ),
    22: Fault("a script that must end", _in("attacks/test_ending", "a_normal_exit_releases")),
    23: Fault(
        "an exit at any moment",
        _in("attacks/test_ending", "the_exit_of_a_busy_process_is_silent_whenever_it_comes"),
    ),
    24: Fault(
        "threads that never run",
        _in("faults/test_interpreters", "a_process_whose_threads_never_run_believes_no_longer_than_its_ttl"),
    ),
    25: Fault(
        "gevent",
        _in("reports/test_renewal", "under_gevent_a_busy_greenlet_loses_nothing_in_silence"),
        "eventlet is no more",
    ),
    26: Fault(
        "a task is cancelled",
        _in("aio/test_cancelling", "two_thousand_random_cancellations_leave_no_lease")
        + _in("aio/test_cancelling", "cancellations_on_a_slow_link_find_calls_under_way_and_leave_no_lease"),
    ),
    27: Fault(
        "a loop is closed with leases held",
        _in("aio/test_loops", "a_loop_that_is_closed_with_leases_held_takes_nothing_with_it"),
    ),
    28: Fault(
        "the executor is busy or gone",
        _in("aio/test_loops", "a_loop_whose_own_executor_is_busy_or_gone_takes_and_keeps_leases_all_the_same"),
    ),
    29: Fault("a free-threaded build, subinterpreters", lacks="a build of Python without the interpreter's lock"),
    30: Fault(
        "one name from many threads of one client",
        _in("client/test_crowds", "sixty_four_threads_ask_two_hundred_times_and_one_holds_at_a_time"),
    ),
    31: Fault(
        "a release races a renewal",
        _contract("a_renewal_and_a_release_at_once_leave_it_free"),
    ),
    # clocks
    32: Fault(
        "a client's wall clock is wrong",
        _in(
            "attacks/test_clocks",
            "a_client_with_a_wrong_clock_takes_nothing_that_lives_deletes_nothing_and_reads_it_right",
        ),
    ),
    33: Fault(
        "a client is suspended",
        _in("faults/test_interpreters", "a_clock_that_jumps_over_the_deadline_ends_belief_at_once"),
        "a machine that can be suspended: the clock is made to jump instead",
    ),
    34: Fault(
        "the server's clock steps forward within the margin",
        (*_in("faults/test_clocks", "a_step_within_the_margin_costs_no_exclusion"), JEPSEN.format("step_clock")),
    ),
    35: Fault(
        "the server's clock steps forward by a minute",
        _in("faults/test_clocks", "a_step_beyond_the_margin_is_what_only_the_fence_survives"),
    ),
    36: Fault(
        "the server's clock steps back by an hour",
        _in("faults/test_clocks", "a_step_back_keeps_a_living_holder_and_an_operator_can_end_a_dead_one"),
    ),
    37: Fault(
        "the server's clock runs fast",
        _in(
            "faults/test_clocks",
            "a_clock_that_runs_four_percent_fast_is_paid_for_by_the_margin",
            "a_clock_that_runs_twice_as_fast_is_beyond_what_is_promised_and_the_next_holder_comes_early",
        ),
    ),
    38: Fault(
        "a failover to a server whose clock is ahead",
        _in("faults/test_clocks", "a_step_beyond_the_margin_is_what_only_the_fence_survives"),
        "seen from clients it is a step of the one clock they ask",
    ),
    39: Fault(
        "time zones",
        _in("faults/test_networks", "in_every_time_zone_of_the_session_a_lease_ends_at_the_same_moment"),
    ),
    40: Fault(
        "a machine that has been up for years",
        _in("faults/test_interpreters", "a_machine_that_has_been_up_for_long_counts_as_well"),
    ),
    # the network
    41: Fault(
        "a reset in mid-conversation",
        (
            *_in("attacks/test_connection_loss", "every_connection_of_a_full_pool_may_die_at_once"),
            JEPSEN.format("cut"),
        ),
    ),
    42: Fault(
        "the reply to a grant is lost",
        _in("attacks/test_connection_loss", "a_grant_whose_reply_was_lost_is_found_again"),
    ),
    43: Fault(
        "the reply to a renewal is lost", _in("reports/test_renewal", "a_renewal_whose_reply_is_lost_is_no_loss")
    ),
    44: Fault(
        "the reply to a release is lost, and a rival has the lease",
        _in(
            "attacks/test_connection_loss",
            "a_release_whose_reply_was_lost_is_no_loss_though_a_rival_has_the_lease_already",
        ),
    ),
    45: Fault(
        "a black hole",
        _in(
            "attacks/test_connection_loss",
            "behind_a_black_hole_the_loss_comes_at_the_deadline_and_before_anybody_else_is_let_in",
        )
        + _in("hybrid/test_cut", "a_cut_network_frees_the_lease_within_seconds_and_the_holder_is_told"),
    ),
    46: Fault(
        "replies are lost, requests arrive",
        _in(
            "faults/test_networks",
            "while_no_reply_arrives_belief_ends_in_time_and_at_most_one_grant_is_left",
        ),
    ),
    47: Fault(
        "delays",
        (
            *_in("attacks/test_connection_loss", "a_slow_link_costs_no_lease"),
            *_in("reports/test_renewal", "a_slow_connection_loses_nothing"),
            JEPSEN.format("delay"),
        ),
    ),
    48: Fault(
        "a reply drips in",
        _in("faults/test_networks", "a_reply_that_drips_in_is_waited_for_no_longer_than_said"),
    ),
    49: Fault(
        "names do not resolve, or only slowly",
        _in(
            "faults/test_networks",
            "a_host_that_nobody_knows_is_unavailable_in_time",
            "a_resolver_that_hangs_keeps_nobody_from_hearing_of_its_loss",
        ),
    ),
    50: Fault(
        "half a connection is left at the server",
        _in("hybrid/test_cut", "a_cut_network_frees_the_lease_within_seconds_and_the_holder_is_told"),
    ),
    51: Fault("connections are refused", _in("faults/test_networks", "a_server_that_hangs_up_is_not_stormed")),
    # PostgreSQL
    52: Fault(
        "the server crashes and comes back",
        _in("attacks/test_connection_loss", "a_lease_outlives_a_server_that_is_away_for_less_than_its_ttl"),
    ),
    53: Fault(
        "a session is ended",
        _in("reports/test_loss", "a_killed_session_is_no_loss_and_a_rival_in_between_is_one"),
    ),
    54: Fault("the server is frozen", _in("reports/test_renewal", "a_frozen_server_is_a_loss_in_time")),
    55: Fault(
        "a failover that loses commits",
        _in("postgres/test_failover", "tokens_rise_over_the_promotion_of_a_replica_that_lost_the_last_grants"),
    ),
    56: Fault(
        "the old primary is still alive",
        _in("postgres/test_failover", "tokens_rise_over_the_promotion_of_a_replica_that_lost_the_last_grants"),
    ),
    57: Fault(
        "a primary is demoted",
        _in("faults/test_servers", "a_primary_that_was_demoted_is_left_and_found_again"),
    ),
    58: Fault(
        "the standby is named first",
        _in("attacks/test_starting", "with_the_standby_named_first_the_primary_is_found"),
    ),
    59: Fault(
        "the synchronous standby is away",
        _in("faults/test_servers", "a_standby_that_is_away_makes_a_grant_unknown_and_not_endless"),
    ),
    60: Fault(
        "a row is locked",
        _in("reports/test_taking", "a_renewal_of_a_row_that_is_locked_is_unknown_and_revives_nothing")
        + _in("fencing/test_heartbeats", "of_twenty_leases_in_a_tick_one_that_is_locked_holds_up_no_other"),
    ),
    61: Fault(
        "the table is locked",
        _in("faults/test_servers", "a_table_that_is_locked_as_a_whole_ends_belief_in_time_and_holds_nobody_up"),
    ),
    62: Fault(
        "another default isolation",
        _in("attacks/test_starting", "a_stricter_default_isolation_costs_no_call"),
    ),
    63: Fault(
        "a connection inside a transaction",
        _in(
            "attacks/test_borrowed",
            "a_connection_inside_a_transaction_is_refused_and_the_callers_rows_are_neither_committed_nor_lost",
        ),
    ),
    64: Fault(
        "batches in opposite orders",
        _contract("batches_in_opposite_orders_do_not_get_in_each_others_way"),
    ),
    65: Fault(
        "a snapshot is held for long",
        (
            *_in("reports/test_renewal", "a_busy_table_stays_small_and_its_heartbeats_hot"),
            "tests/soak.py::under_a_held_snapshot",
        ),
    ),
    66: Fault(
        "the table is missing, older, or has more columns",
        _in("postgres/test_schema", "a_missing_table_is_not_made_unless_wanted")
        + _in("postgres/test_schema", "a_table_that_was_dropped_comes_back_above_every_token")
        + _in("postgres/test_upgrade", "extra_columns_of_the_users_are_kept"),
    ),
    67: Fault(
        "many make the table at once",
        _in("postgres/test_schema", "any_number_of_processes_may_start_at_once"),
    ),
    68: Fault(
        "no more connections",
        _in("faults/test_servers", "a_database_that_takes_no_more_connections_costs_no_lease_that_is_held"),
    ),
    69: Fault(
        "a full disk",
        _in("faults/test_servers", "a_full_disk_is_trouble_and_leaves_nothing_by_halves"),
    ),
    70: Fault(
        "a password is changed",
        _in("faults/test_servers", "a_password_that_was_changed_costs_nothing_until_the_connection_does"),
    ),
    71: Fault(
        "a cleanup races a grant",
        _in("postgres/test_tokens", "no_token_is_granted_twice_while_a_cleanup_hammers")
        + _in("postgres/test_tokens", "a_cleanup_waits_for_an_insert_that_has_read_the_floor_already"),
    ),
    # poolers and other stores
    72: Fault(
        "PgBouncer in transaction mode",
        (
            *_in("postgres/test_schema", "a_pooler_in_transaction_mode_is_no_obstacle"),
            "tests/test_postgres_pgbouncer_contract.py::",
        ),
    ),
    73: Fault(
        "PgBouncer before the hybrid",
        _in("hybrid/test_refusals", "a_transaction_pooler_is_refused_before_anything_is_made"),
    ),
    74: Fault("the pooler is stopped, or opens its sessions anew", (JEPSEN.format("recycle_pooler"),)),
    75: Fault(
        "Redis dies, sleeps, is full, forgets",
        _in(
            "redis/test_trouble",
            "a_killed_server_that_comes_back_costs_one_try_again_and_no_lease",
            "a_pause_is_waited_out",
            "a_server_without_memory_refuses_and_changes_nothing",
            "a_server_that_cannot_save_refuses_and_says_why",
        )
        + _in("redis/test_keys", "scripts_that_the_server_forgot_are_loaded_again")
        + _in("redis/test_client", "a_hold_that_was_flushed_away_is_lost_at_the_next_renewal")
        + _in("redis/test_replicas", "a_failover_that_lost_a_grant_repeats_its_token"),
    ),
    76: Fault(
        "SQLite: a stopped writer, a kill, a full disk, a file that is gone",
        _in(
            "sqlite/test_processes",
            "behind_a_stopped_writer_every_call_ends_in_its_time",
            "a_process_killed_at_any_moment_breaks_nothing",
        )
        + _in(
            "sqlite/test_file",
            "a_full_disk_is_trouble_that_passes",
            "a_replaced_file_is_noticed",
            "a_read_only_file_can_be_looked_at_and_not_be_written",
        ),
    ),
    77: Fault(
        "Kubernetes: conflicts, throttling, a lost answer, a deleted object",
        _in(
            "kubernetes/test_faults",
            "a_new_name_is_granted_once_whatever_became_of_its_creation",
            "it_waits_as_long_as_the_server_asks",
            "a_rival_who_writes_first_wins_and_is_named",
            "a_deleted_lease_is_lost_and_stays_deleted",
            "times_that_a_wrong_clock_wrote_decide_nothing",
        ),
    ),
    # misuse and malice
    78: Fault(
        "names that are none",
        _in("attacks/test_misuse", "a_name_that_is_none_is_refused_by_every_call")
        + _in("test_options", "any_text_is_a_name_as_it_stands_or_a_configuration_error"),
    ),
    79: Fault(
        "SQL in identifiers, a hostile search path",
        _in("attacks/test_misuse", "a_table_name_that_is_no_single_identifier_is_refused")
        + _in("postgres/test_schema", "functions_that_shadow_the_servers_are_not_called"),
    ),
    80: Fault(
        "secrets in texts",
        _in(
            "units/test_dsn",
            "a_password_that_was_not_encoded_is_never_shown",
            "every_form_of_a_secret_is_scrubbed_out_of_foreign_text",
        ),
        "the password of every address in the suite is a canary that must come out nowhere (`tests/support/canary.py`)",
    ),
    81: Fault(
        "a role without DDL and DELETE",
        _in("postgres/test_schema", "the_grants_are_enough_for_each_role_and_no_more"),
    ),
    82: Fault("a role or session that may only read", _in("attacks/test_starting", "a_read_only_session_is_named")),
    83: Fault(
        "policies on rows",
        _in("faults/test_hostile", "where_a_policy_hides_the_row_nobody_is_told_that_they_hold_it"),
    ),
    84: Fault(
        "forged rows",
        _in(
            "faults/test_hostile",
            "a_row_that_somebody_forged_crashes_no_reader",
            "a_token_at_its_end_is_refused_and_does_not_wrap",
        ),
    ),
    85: Fault(
        "metadata of strangers",
        _in("test_options", "what_is_no_json_object_of_modest_size_is_refused")
        + _in("faults/test_hostile", "a_forged_holder_writes_no_line_of_its_own_into_a_log_or_a_terminal"),
    ),
    86: Fault("very many names", _contract("cleanup_counts_age_from_the_end_of_a_hold")),
    87: Fault(
        "one name is hammered",
        _in("reports/test_postgres_field", "a_try_on_a_name_that_is_held_writes_nothing"),
    ),
    88: Fault(
        "squatting by a role of the application", lacks="out of scope: who may write the table may take every lease"
    ),
    89: Fault(
        "TLS",
        _in(
            "faults/test_tls",
            "a_server_whose_certificate_is_trusted_is_talked_to_under_it",
            "a_server_whose_certificate_nobody_vouches_for_is_refused",
            "a_server_without_tls_is_not_talked_to_in_the_clear_where_tls_was_asked_for",
        ),
    ),
    90: Fault(
        "libpq's own files",
        _in(
            "faults/test_hostile",
            "a_password_may_be_kept_where_libpq_looks_for_it",
            "a_service_may_be_named_where_libpq_looks_for_it",
        ),
    ),
    91: Fault(
        "work at import",
        _in("test_packaging", "importing_pglease_imports_no_driver_and_no_framework"),
    ),
    92: Fault("pickles and copies", _in("client/test_handle", "neither_handle_nor_client_is_pickled_or_copied")),
    93: Fault(
        "a loss nobody looked for", _in("reports/test_loss", "leaving_a_block_after_a_loss_raises_without_any_callback")
    ),
    94: Fault(
        "blocks entered twice, foreign releases",
        _in("client/test_blocks", "a_context_can_be_used_again_after_it_was_left_and_not_before")
        + _in("attacks/test_one_owner", "a_restarted_worker_cannot_release_what_it_never_acquired"),
    ),
    95: Fault("a ttl that is none", _in("attacks/test_misuse", "a_ttl_that_is_none_is_refused_by_every_call")),
    96: Fault(
        "one label on two hosts",
        _in("attacks/test_one_owner", "two_clients_with_one_label_exclude_each_other")
        + _in("documented_0_0_x/test_snippets", "ten_replicas_with_one_hostname_migrate_on_one_of_them"),
    ),
}
