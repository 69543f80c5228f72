//! The list of scenarios: one test each, in every engine that expands it.

/// Expands to one test per scenario of the suite. The expression makes a fresh
/// [`Harness`](crate::conformance::Harness) each time; the calling crate needs `tokio` with its macros.
///
/// ```text
/// everbus_testkit::conformance_tests!(MyHarness::new());
/// ```
#[macro_export]
macro_rules! conformance_tests {
    ($harness:expr) => {
        // conformance: bus/order: order holds within the log for one consumer of a group
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn events_come_in_the_order_of_the_log() {
            $crate::conformance::run(
 "consuming::events_come_in_the_order_of_the_log",
 $crate::conformance::consuming::events_come_in_the_order_of_the_log($harness)
 ).await;
        }

        // conformance: bus/wake-up: a publish wakes waiting consumers without polling
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_waiting_fetch_is_woken_by_an_append() {
            $crate::conformance::run(
 "consuming::a_waiting_fetch_is_woken_by_an_append",
 $crate::conformance::consuming::a_waiting_fetch_is_woken_by_an_append($harness)
 ).await;
        }

        // conformance: bus/competing: consumers of one group compete; no event is delivered twice and all are handled
        // conformance: omni/why-parallel: consumers of one group share its events and handle them in parallel
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn competing_consumers_share_and_never_double() {
            $crate::conformance::run(
 "consuming::competing_consumers_share_and_never_double",
 $crate::conformance::consuming::competing_consumers_share_and_never_double($harness)
 ).await;
        }

        // conformance: rule-2/groups: each group has its own position, attempts and dead letters
        // conformance: embedded/non-goal-groups: each group has its own position, attempts and dead letters
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn groups_are_independent() {
            $crate::conformance::run(
 "consuming::groups_are_independent",
 $crate::conformance::consuming::groups_are_independent($harness)
 ).await;
        }

        // conformance: bus/prefetch: a consumer never holds more unsettled deliveries than its prefetch
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn the_prefetch_bound_is_respected() {
            $crate::conformance::run(
 "consuming::the_prefetch_bound_is_respected",
 $crate::conformance::consuming::the_prefetch_bound_is_respected($harness)
 ).await;
        }

        // conformance: fault-10/cancelled-fetch: a fetch future that is dropped loses nothing and counts nothing
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn dropping_a_fetch_loses_nothing() {
            $crate::conformance::run(
 "consuming::dropping_a_fetch_loses_nothing",
 $crate::conformance::consuming::dropping_a_fetch_loses_nothing($harness)
 ).await;
        }

        // conformance: fault-10/given-back: what was claimed and not fetched is given back without an attempt
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn what_was_not_fetched_is_given_back() {
            $crate::conformance::run(
 "consuming::what_was_not_fetched_is_given_back",
 $crate::conformance::consuming::what_was_not_fetched_is_given_back($harness)
 ).await;
        }

        // conformance: rule-4/held: what fetch hands out is held, however long ago it was claimed
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn what_is_handed_out_is_held() {
            $crate::conformance::run(
 "consuming::what_is_handed_out_is_held",
 $crate::conformance::consuming::what_is_handed_out_is_held($harness)
 ).await;
        }

        // conformance: bus/unknown-group: consuming a group nobody declared is an error
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn an_unknown_group_cannot_be_consumed() {
            $crate::conformance::run(
 "consuming::an_unknown_group_cannot_be_consumed",
 $crate::conformance::consuming::an_unknown_group_cannot_be_consumed($harness)
 ).await;
        }

        // conformance: embedded/shutdown-error: publish and subscribe after shutdown give EventBusShutdownError
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn after_close_everything_is_refused() {
            $crate::conformance::run(
 "consuming::after_close_everything_is_refused",
 $crate::conformance::consuming::after_close_everything_is_refused($harness)
 ).await;
        }

        // conformance: embedded/transitions: an event goes pending, processing, done, and a handled one never comes again
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn an_acked_event_is_done() {
            $crate::conformance::run(
 "settling::an_acked_event_is_done",
 $crate::conformance::settling::an_acked_event_is_done($harness)
 ).await;
        }

        // conformance: fault-5/cursor: a position never passes an unfinished earlier event
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn acks_out_of_order_pass_over_nothing() {
            $crate::conformance::run(
 "settling::acks_out_of_order_pass_over_nothing",
 $crate::conformance::settling::acks_out_of_order_pass_over_nothing($harness)
 ).await;
        }

        // conformance: embedded/retry-delay: a failed event is tried again after its delay, not before, with all its errors in order
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_failed_event_waits_out_its_delay() {
            $crate::conformance::run(
 "settling::a_failed_event_waits_out_its_delay",
 $crate::conformance::settling::a_failed_event_waits_out_its_delay($harness)
 ).await;
        }

        // conformance: rule-5/no-blocking: a failing event does not block others, each retry comes at its own time
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn waiting_events_come_each_at_its_time() {
            $crate::conformance::run(
 "settling::waiting_events_come_each_at_its_time",
 $crate::conformance::settling::waiting_events_come_each_at_its_time($harness)
 ).await;
        }

        // conformance: embedded/dlq-context: a dead letter keeps the original event, every error, the attempts and the time of the final failure
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_dead_lettered_event_is_kept_with_its_history() {
            $crate::conformance::run(
 "settling::a_dead_lettered_event_is_kept_with_its_history",
 $crate::conformance::settling::a_dead_lettered_event_is_kept_with_its_history($harness)
 ).await;
        }

        // conformance: bus/release: a released delivery comes again without an attempt counted
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_release_is_not_an_attempt() {
            $crate::conformance::run(
 "settling::a_release_is_not_an_attempt",
 $crate::conformance::settling::a_release_is_not_an_attempt($harness)
 ).await;
        }

        // conformance: rule-3/lease-end: a lease that ends gives the event back with the attempt counted and a crash recorded
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_lease_that_ends_counts_as_a_crash() {
            $crate::conformance::run(
 "settling::a_lease_that_ends_counts_as_a_crash",
 $crate::conformance::settling::a_lease_that_ends_counts_as_a_crash($harness)
 ).await;
        }

        // conformance: fault-7/zombie: a late ack cannot complete another worker's lease
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_late_settlement_is_refused() {
            $crate::conformance::run(
 "settling::a_late_settlement_is_refused",
 $crate::conformance::settling::a_late_settlement_is_refused($harness)
 ).await;
        }

        // conformance: rule-4/fenced: a lease that ended is lost even when nobody else took the event yet
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_settlement_after_the_lease_is_refused() {
            $crate::conformance::run(
 "settling::a_settlement_after_the_lease_is_refused",
 $crate::conformance::settling::a_settlement_after_the_lease_is_refused($harness)
 ).await;
        }

        // conformance: rule-4/once: a lease settles once, answers are per item
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_second_settlement_is_refused() {
            $crate::conformance::run(
 "settling::a_second_settlement_is_refused",
 $crate::conformance::settling::a_second_settlement_is_refused($harness)
 ).await;
        }

        // conformance: rule-4/extend: an extended lease is kept beyond its first end
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn an_extended_lease_is_kept() {
            $crate::conformance::run(
 "settling::an_extended_lease_is_kept",
 $crate::conformance::settling::an_extended_lease_is_kept($harness)
 ).await;
        }

        // conformance: bus/follow-ups: follow-up events are appended in one step with the verdict
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn follow_ups_are_appended_with_the_verdict() {
            $crate::conformance::run(
 "settling::follow_ups_are_appended_with_the_verdict",
 $crate::conformance::settling::follow_ups_are_appended_with_the_verdict($harness)
 ).await;
        }

        // conformance: contract/failure-follow-ups: follow-ups go with a retry, a dead letter and a skip; if one is refused nothing is applied and the lease is still held
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn follow_ups_go_with_a_failure() {
            $crate::conformance::run(
                "settling::follow_ups_go_with_a_failure",
                $crate::conformance::settling::follow_ups_go_with_a_failure($harness),
            )
            .await;
        }

        // conformance: rule-4/follow-ups: a settlement whose lease was lost appends nothing
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn follow_ups_of_a_lost_lease_are_not_appended() {
            $crate::conformance::run(
 "settling::follow_ups_of_a_lost_lease_are_not_appended",
 $crate::conformance::settling::follow_ups_of_a_lost_lease_are_not_appended($harness)
 ).await;
        }

        // conformance: rule-5/key: a failing event blocks those with the same key in an ordered group, until it is dead-lettered
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn the_same_key_is_strictly_sequential() {
            $crate::conformance::run(
 "ordered::the_same_key_is_strictly_sequential",
 $crate::conformance::ordered::the_same_key_is_strictly_sequential($harness)
 ).await;
        }

        // conformance: rule-5/key-retried: a retried dead letter goes before the later events of its key
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_retried_dead_letter_goes_before_its_key() {
            $crate::conformance::run(
 "ordered::a_retried_dead_letter_goes_before_its_key",
 $crate::conformance::ordered::a_retried_dead_letter_goes_before_its_key($harness)
 ).await;
        }

        // conformance: rule-5/key-consumers: the order by key holds between competing consumers and lost leases
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn the_key_holds_between_consumers() {
            $crate::conformance::run(
 "ordered::the_key_holds_between_consumers",
 $crate::conformance::ordered::the_key_holds_between_consumers($harness)
 ).await;
        }

        // conformance: rule-5/key-random: under random verdicts every key is handled in order, and all of it
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn random_work_keeps_every_key_in_order() {
            $crate::conformance::run(
 "ordered::random_work_keeps_every_key_in_order",
 $crate::conformance::ordered::random_work_keeps_every_key_in_order($harness)
 ).await;
        }

        // conformance: bus/settled-none: an event no group wants is settled at once
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn an_event_nobody_wants_is_settled() {
            $crate::conformance::run(
 "settled::an_event_nobody_wants_is_settled",
 $crate::conformance::settled::an_event_nobody_wants_is_settled($harness)
 ).await;
        }

        // conformance: bus/settled-later: settled covers the groups declared when the event was published
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_later_group_is_not_waited_for() {
            $crate::conformance::run(
 "settled::a_later_group_is_not_waited_for",
 $crate::conformance::settled::a_later_group_is_not_waited_for($harness)
 ).await;
        }

        // conformance: embedded/publish-awaits: a publisher can wait until every matching group has handled or dead-lettered its event
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn settled_waits_for_every_group() {
            $crate::conformance::run(
 "settled::settled_waits_for_every_group",
 $crate::conformance::settled::settled_waits_for_every_group($harness)
 ).await;
        }

        // conformance: bus/settled-skip: skipping settles, and so does removing the group
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn skipping_or_removing_the_group_settles() {
            $crate::conformance::run(
 "settled::skipping_or_removing_the_group_settles",
 $crate::conformance::settled::skipping_or_removing_the_group_settles($harness)
 ).await;
        }

        // conformance: bus/settled-timeout: a wait for settlement takes a timeout
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_wait_that_is_too_long_times_out() {
            $crate::conformance::run(
 "settled::a_wait_that_is_too_long_times_out",
 $crate::conformance::settled::a_wait_that_is_too_long_times_out($harness)
 ).await;
        }

        // conformance: bus/dedup: the same event twice returns the first receipt and stores nothing
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn the_same_event_twice_is_stored_once() {
            $crate::conformance::run(
 "appending::the_same_event_twice_is_stored_once",
 $crate::conformance::appending::the_same_event_twice_is_stored_once($harness)
 ).await;
        }

        // conformance: bus/id-reused: the same id with another body is IdReused
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn the_same_id_with_another_body_is_refused() {
            $crate::conformance::run(
 "appending::the_same_id_with_another_body_is_refused",
 $crate::conformance::appending::the_same_id_with_another_body_is_refused($harness)
 ).await;
        }

        // conformance: bus/dedup-batch: a batch may repeat an event
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_batch_may_repeat_an_event() {
            $crate::conformance::run(
 "appending::a_batch_may_repeat_an_event",
 $crate::conformance::appending::a_batch_may_repeat_an_event($harness)
 ).await;
        }

        // conformance: fault-2/atomic-batch: a batch that is refused stores nothing and acknowledges nothing
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_batch_is_stored_whole_or_not_at_all() {
            $crate::conformance::run(
 "appending::a_batch_is_stored_whole_or_not_at_all",
 $crate::conformance::appending::a_batch_is_stored_whole_or_not_at_all($harness)
 ).await;
        }

        // conformance: bus/tenant-ids: ids are unique per tenant
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn ids_are_unique_per_tenant() {
            $crate::conformance::run(
 "appending::ids_are_unique_per_tenant",
 $crate::conformance::appending::ids_are_unique_per_tenant($harness)
 ).await;
        }

        // conformance: embedded/payload: payloads of 1 MB and odd ones come out byte for byte as they went in
        // conformance: embedded/metadata: metadata comes out as it went in, in a delivery and by the event's id
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn odd_payloads_come_out_as_they_went_in() {
            $crate::conformance::run(
 "appending::odd_payloads_come_out_as_they_went_in",
 $crate::conformance::appending::odd_payloads_come_out_as_they_went_in($harness)
 ).await;
        }

        // conformance: bus/odd-types: types with spaces, without dots, of 255 characters are carried
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn odd_types_are_carried() {
            $crate::conformance::run(
 "appending::odd_types_are_carried",
 $crate::conformance::appending::odd_types_are_carried($harness)
 ).await;
        }

        // conformance: bus/log: the log can be read, searched and waited on without a group
        // conformance: omni/why-persisted: events stay in the log and can be read again
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn the_log_can_be_read_without_a_group() {
            $crate::conformance::run(
 "appending::the_log_can_be_read_without_a_group",
 $crate::conformance::appending::the_log_can_be_read_without_a_group($harness)
 ).await;
        }

        // conformance: embedded/shutdown-load: closing while many publish forgets nothing that was acknowledged
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn closing_under_load_forgets_nothing_acknowledged() {
            $crate::conformance::run(
 "appending::closing_under_load_forgets_nothing_acknowledged",
 $crate::conformance::appending::closing_under_load_forgets_nothing_acknowledged($harness)
 ).await;
        }

        // conformance: bus/start-new: a group that starts at new gets what is published from then on
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn start_from_new() {
            $crate::conformance::run(
 "groups::start_from_new",
 $crate::conformance::groups::start_from_new($harness)
 ).await;
        }

        // conformance: bus/start-first: a group that starts at first gets everything there is
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn start_from_first() {
            $crate::conformance::run(
 "groups::start_from_first",
 $crate::conformance::groups::start_from_first($harness)
 ).await;
        }

        // conformance: bus/start-last: a group that starts at last begins with the newest matching event
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn start_from_last() {
            $crate::conformance::run(
 "groups::start_from_last",
 $crate::conformance::groups::start_from_last($harness)
 ).await;
        }

        // conformance: bus/start-time: a group that starts at a time begins with the first event received then or later
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn start_from_a_time() {
            $crate::conformance::run(
 "groups::start_from_a_time",
 $crate::conformance::groups::start_from_a_time($harness)
 ).await;
        }

        // conformance: bus/durable-group: an existing group keeps its position and subscription ids
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn an_existing_group_keeps_its_position() {
            $crate::conformance::run(
 "groups::an_existing_group_keeps_its_position",
 $crate::conformance::groups::an_existing_group_keeps_its_position($harness)
 ).await;
        }

        // conformance: embedded/glob: a group gets the events its glob patterns match and skips the others
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn unmatched_events_are_skipped() {
            $crate::conformance::run(
 "groups::unmatched_events_are_skipped",
 $crate::conformance::groups::unmatched_events_are_skipped($harness)
 ).await;
        }

        // conformance: bus/widening: a new pattern applies from the group's position on
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn widening_is_not_retroactive() {
            $crate::conformance::run(
 "groups::widening_is_not_retroactive",
 $crate::conformance::groups::widening_is_not_retroactive($harness)
 ).await;
        }

        // conformance: bus/system: the system's own events are left out of the star
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn system_events_are_left_out_of_the_star() {
            $crate::conformance::run(
 "groups::system_events_are_left_out_of_the_star",
 $crate::conformance::groups::system_events_are_left_out_of_the_star($harness)
 ).await;
        }

        // conformance: embedded/unsubscribe: an unsubscribed pattern gets nothing new, what was handed out stays owed
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn retracting_mid_flight_keeps_what_is_owed() {
            $crate::conformance::run(
 "groups::retracting_mid_flight_keeps_what_is_owed",
 $crate::conformance::groups::retracting_mid_flight_keeps_what_is_owed($harness)
 ).await;
        }

        // conformance: bus/remove-group: a removed group takes its position, deliveries and dead letters with it
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_removed_group_leaves_nothing_behind() {
            $crate::conformance::run(
 "groups::a_removed_group_leaves_nothing_behind",
 $crate::conformance::groups::a_removed_group_leaves_nothing_behind($harness)
 ).await;
        }

        // conformance: bus/no-handler-here: an event whose handler is not registered here is left to other processes
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn an_event_without_a_handler_is_left_to_others() {
            $crate::conformance::run(
 "groups::an_event_without_a_handler_is_left_to_others",
 $crate::conformance::groups::an_event_without_a_handler_is_left_to_others($harness)
 ).await;
        }

        // conformance: rule-9/no-handler: a type that no process has a handler for is dead-lettered after a configurable time, never acked by falling through
        // conformance: fault-4/no-handler: an event no process handles becomes a dead letter after a configurable time, never an ack
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn an_event_nobody_handles_is_dead_lettered_in_the_end() {
            $crate::conformance::run(
 "groups::an_event_nobody_handles_is_dead_lettered_in_the_end",
 $crate::conformance::groups::an_event_nobody_handles_is_dead_lettered_in_the_end($harness)
 ).await;
        }

        // conformance: embedded/restart: after a restart settled events stay settled and the rest comes again
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_restart_keeps_everything() {
            $crate::conformance::run(
 "restart::a_restart_keeps_everything",
 $crate::conformance::restart::a_restart_keeps_everything($harness)
 ).await;
        }

        // conformance: embedded/crash-recovery: events in flight at a crash go back to waiting with their attempt counted
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_crash_keeps_everything() {
            $crate::conformance::run(
 "restart::a_crash_keeps_everything",
 $crate::conformance::restart::a_crash_keeps_everything($harness)
 ).await;
        }

        // conformance: bus/restart-identity: ids are recognised and positions go on after a restart
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn identity_and_positions_survive() {
            $crate::conformance::run(
 "restart::identity_and_positions_survive",
 $crate::conformance::restart::identity_and_positions_survive($harness)
 ).await;
        }

        // conformance: rule-3/attempts: attempts are durable before the handler runs
        // conformance: bus/attempts-durable: attempts are durable before the handler runs
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn every_crash_is_counted() {
            $crate::conformance::run(
 "restart::every_crash_is_counted",
 $crate::conformance::restart::every_crash_is_counted($harness)
 ).await;
        }

        // conformance: bus/clock-back: a clock that is set back neither loses nor reorders events
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_clock_set_back_keeps_the_order() {
            $crate::conformance::run(
 "restart::a_clock_set_back_keeps_the_order",
 $crate::conformance::restart::a_clock_set_back_keeps_the_order($harness)
 ).await;
        }

        // conformance: embedded/dlq-list: dead letters are listed newest first with offset and limit, 100 by default
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn pages_by_offset_and_by_key_agree() {
            $crate::conformance::run(
 "dead_letters::pages_by_offset_and_by_key_agree",
 $crate::conformance::dead_letters::pages_by_offset_and_by_key_agree($harness)
 ).await;
        }

        // conformance: bus/dlq-filters: dead letters are filtered by type, group, event and time
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn filters_select() {
            $crate::conformance::run(
 "dead_letters::filters_select",
 $crate::conformance::dead_letters::filters_select($harness)
 ).await;
        }

        // conformance: embedded/dlq-retry: a retried dead letter is reset in full and goes only to the group that failed
        // conformance: bus/dlq-retry-own-group: a retried dead letter is reset in full and goes only to the group that failed
        // conformance: omni/dlq-retry: a retried dead letter is reset in full and goes only to the group that failed
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_retry_goes_to_the_group_that_failed() {
            $crate::conformance::run(
 "dead_letters::a_retry_goes_to_the_group_that_failed",
 $crate::conformance::dead_letters::a_retry_goes_to_the_group_that_failed($harness)
 ).await;
        }

        // conformance: bus/dlq-again: a retried dead letter that fails again is the same row, attempts add up
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_retried_dead_letter_that_fails_again_is_the_same() {
            $crate::conformance::run(
 "dead_letters::a_retried_dead_letter_that_fails_again_is_the_same",
 $crate::conformance::dead_letters::a_retried_dead_letter_that_fails_again_is_the_same($harness)
 ).await;
        }

        // conformance: bus/dlq-retry-many: many dead letters are retried by filter at once
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn many_are_retried_at_once() {
            $crate::conformance::run(
 "dead_letters::many_are_retried_at_once",
 $crate::conformance::dead_letters::many_are_retried_at_once($harness)
 ).await;
        }

        // conformance: embedded/dlq-purge: purge deletes dead events up to and including the cutoff of creation
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn purging_is_inclusive() {
            $crate::conformance::run(
 "dead_letters::purging_is_inclusive",
 $crate::conformance::dead_letters::purging_is_inclusive($harness)
 ).await;
        }

        // conformance: bus/dlq-purge-died: purge may go by the time of death
        // conformance: embedded/dlq-at: purge may go by the time of death
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn purging_by_time_of_death() {
            $crate::conformance::run(
 "dead_letters::purging_by_time_of_death",
 $crate::conformance::dead_letters::purging_by_time_of_death($harness)
 ).await;
        }

        // conformance: rule-7/purge: purging takes no event another group owes work on
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn purging_leaves_what_others_owe() {
            $crate::conformance::run(
 "dead_letters::purging_leaves_what_others_owe",
 $crate::conformance::dead_letters::purging_leaves_what_others_owe($harness)
 ).await;
        }

        // conformance: memory/stages-kept: stages are kept by event and stage with sizes, status, details and flags, oldest first
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn stages_are_kept_by_event_and_stage() {
            $crate::conformance::run(
 "payloads::stages_are_kept_by_event_and_stage",
 $crate::conformance::payloads::stages_are_kept_by_event_and_stage($harness)
 ).await;
        }

        // conformance: memory/stages-need-event: a stage needs its event, and an id is that of one tenant
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_stage_needs_its_event() {
            $crate::conformance::run(
 "payloads::a_stage_needs_its_event",
 $crate::conformance::payloads::a_stage_needs_its_event($harness)
 ).await;
        }

        // conformance: memory/stages-largest: the largest stages come largest first, only those over the limit
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn the_largest_stages_come_first() {
            $crate::conformance::run(
 "payloads::the_largest_stages_come_first",
 $crate::conformance::payloads::the_largest_stages_come_first($harness)
 ).await;
        }

        // conformance: memory/stages-deleted: stages are deleted with their event
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn stages_go_with_their_event() {
            $crate::conformance::run(
 "payloads::stages_go_with_their_event",
 $crate::conformance::payloads::stages_go_with_their_event($harness)
 ).await;
        }

        // conformance: memory/overflow-noted: an event that is removed leaves a note of its object in the same step
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_removed_event_leaves_a_note_of_its_object() {
            $crate::conformance::run(
 "payloads::a_removed_event_leaves_a_note_of_its_object",
 $crate::conformance::payloads::a_removed_event_leaves_a_note_of_its_object($harness)
 ).await;
        }

        // conformance: memory/overflow-same-payload: the same id with the same payload is silent success under any threshold, with another payload IdReused
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_repeated_publish_is_told_by_the_whole_payload() {
            $crate::conformance::run(
 "payloads::a_repeated_publish_is_told_by_the_whole_payload",
 $crate::conformance::payloads::a_repeated_publish_is_told_by_the_whole_payload($harness)
 ).await;
        }

        // conformance: memory/overflow-note-first: an object is noted before it is put; the append of its event strikes the note off in the same step
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn the_append_of_an_event_strikes_off_the_note_of_its_object() {
            $crate::conformance::run(
 "payloads::the_append_of_an_event_strikes_off_the_note_of_its_object",
 $crate::conformance::payloads::the_append_of_an_event_strikes_off_the_note_of_its_object($harness)
 ).await;
        }

        // conformance: memory/dlq-notice: an event system.dead_letter is published for each dead letter
        // conformance: omni/dlq-alert: system.dead_letter {eventId, eventType, error} is published, never for a system.* event
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn every_dead_letter_is_told_of() {
            $crate::conformance::run(
 "notices::every_dead_letter_is_told_of",
 $crate::conformance::notices::every_dead_letter_is_told_of($harness)
 ).await;
        }

        // conformance: memory/dlq-notice-ways: whatever makes a dead letter, the event that tells of it is in the same step
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn every_way_to_die_is_told() {
            $crate::conformance::run(
 "notices::every_way_to_die_is_told",
 $crate::conformance::notices::every_way_to_die_is_told($harness)
 ).await;
        }

        // conformance: memory/dlq-notice-again: a dead letter that was retried and fails again is told of again
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn dying_again_is_told_again() {
            $crate::conformance::run(
 "notices::dying_again_is_told_again",
 $crate::conformance::notices::dying_again_is_told_again($harness)
 ).await;
        }

        // conformance: memory/dlq-notice-atomic: a settlement that is refused tells of nothing
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_refused_settlement_tells_of_nothing() {
            $crate::conformance::run(
 "notices::a_refused_settlement_tells_of_nothing",
 $crate::conformance::notices::a_refused_settlement_tells_of_nothing($harness)
 ).await;
        }

        // conformance: memory/dlq-notice-size: a long error is cut in the notice and kept in the dead letter
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_long_error_is_cut_in_the_notice() {
            $crate::conformance::run(
 "notices::a_long_error_is_cut_in_the_notice",
 $crate::conformance::notices::a_long_error_is_cut_in_the_notice($harness)
 ).await;
        }

        // conformance: memory/dlq-filter: dead letters are chosen by tenant, handler, error and time of death
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn dead_letters_are_chosen_by_why_they_died() {
            $crate::conformance::run(
 "reviving::dead_letters_are_chosen_by_why_they_died",
 $crate::conformance::reviving::dead_letters_are_chosen_by_why_they_died($harness)
 ).await;
        }

        // conformance: memory/dlq-tally: what fails alike is counted by group, type and error
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_tally_counts_what_fails_alike() {
            $crate::conformance::run(
 "reviving::a_tally_counts_what_fails_alike",
 $crate::conformance::reviving::a_tally_counts_what_fails_alike($harness)
 ).await;
        }

        // conformance: memory/dlq-retry-some: dead letters are retried a few at a time, oldest first
        // conformance: framework/dlq-replay-count: so many dead letters are replayed and no more
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_few_are_retried_oldest_first() {
            $crate::conformance::run(
 "reviving::a_few_are_retried_oldest_first",
 $crate::conformance::reviving::a_few_are_retried_oldest_first($harness)
 ).await;
        }

        // conformance: memory/dlq-retry-order: the order of a key is kept when dead letters are retried
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn retried_events_of_a_key_keep_their_order() {
            $crate::conformance::run(
 "reviving::retried_events_of_a_key_keep_their_order",
 $crate::conformance::reviving::retried_events_of_a_key_keep_their_order($harness)
 ).await;
        }

        // conformance: memory/dlq-edit: a corrected event replaces a dead letter in the group that failed; the original is kept, both are linked
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_corrected_event_replaces_a_dead_letter() {
            $crate::conformance::run(
 "reviving::a_corrected_event_replaces_a_dead_letter",
 $crate::conformance::reviving::a_corrected_event_replaces_a_dead_letter($harness)
 ).await;
        }

        // conformance: memory/dlq-edit-reaches: the failing group gets the corrected event once, whatever it wants by now
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_correction_finds_its_group() {
            $crate::conformance::run(
 "reviving::a_correction_finds_its_group",
 $crate::conformance::reviving::a_correction_finds_its_group($harness)
 ).await;
        }

        // conformance: memory/dlq-edit-refused: a correction that is none changes nothing
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn what_cannot_replace_a_dead_letter_is_refused() {
            $crate::conformance::run(
 "reviving::what_cannot_replace_a_dead_letter_is_refused",
 $crate::conformance::reviving::what_cannot_replace_a_dead_letter_is_refused($harness)
 ).await;
        }

        // conformance: memory/dlq-edit-order: a corrected event stands at the end of its key
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_correction_keeps_the_order_of_its_key() {
            $crate::conformance::run(
 "reviving::a_correction_keeps_the_order_of_its_key",
 $crate::conformance::reviving::a_correction_keeps_the_order_of_its_key($harness)
 ).await;
        }

        // conformance: bus/inspect: position, lag, in flight, waiting and dead letters of a group are right
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn the_numbers_of_a_group_are_right() {
            $crate::conformance::run(
 "upkeep::the_numbers_of_a_group_are_right",
 $crate::conformance::upkeep::the_numbers_of_a_group_are_right($harness)
 ).await;
        }

        // conformance: contract/lag-matching: a group is behind by the events that match, told apart by type and stream, and by no others
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_group_is_not_behind_by_what_it_does_not_want() {
            $crate::conformance::run(
                "upkeep::a_group_is_not_behind_by_what_it_does_not_want",
                $crate::conformance::upkeep::a_group_is_not_behind_by_what_it_does_not_want($harness),
            )
            .await;
        }

        // conformance: embedded/states: an event has exactly one state in every group
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn every_event_has_one_state_per_group() {
            $crate::conformance::run(
 "upkeep::every_event_has_one_state_per_group",
 $crate::conformance::upkeep::every_event_has_one_state_per_group($harness)
 ).await;
        }

        // conformance: fault-9/retention: retention never removes what a group owes work on, nor a dead letter
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn retention_takes_nothing_anyone_needs() {
            $crate::conformance::run(
 "upkeep::retention_takes_nothing_anyone_needs",
 $crate::conformance::upkeep::retention_takes_nothing_anyone_needs($harness)
 ).await;
        }

        // conformance: bus/retention: retention by age and length takes the oldest
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn retention_by_age_and_by_length() {
            $crate::conformance::run(
 "upkeep::retention_by_age_and_by_length",
 $crate::conformance::upkeep::retention_by_age_and_by_length($harness)
 ).await;
        }

        // conformance: memory/retention-streams: each stream has an age of its own, the first that matches counts
        // conformance: omni/stream-retention: events go after the ages of the stream table, 30/90/7/7/30/7 days
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn streams_have_ages_of_their_own() {
            $crate::conformance::run(
 "retention::streams_have_ages_of_their_own",
 $crate::conformance::retention::streams_have_ages_of_their_own($harness)
 ).await;
        }

        // conformance: memory/ttl: an event that says when it expires goes then, follow-ups too, unless a group owes work on it
        // conformance: workflow/ttl: TTL on the ttl attribute
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn events_go_when_they_expire() {
            $crate::conformance::run(
 "retention::events_go_when_they_expire",
 $crate::conformance::retention::events_go_when_they_expire($harness)
 ).await;
        }

        // conformance: memory/retention-dead-letters: dead letters go 30 days after death, or never; their events stay
        // conformance: memory/retention-letter-reason: a group whose dead letter went by its age has skipped the event with a reason, until it gets it once more
        // conformance: omni/dead-letter-age: dead letter payloads are kept 30 days
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn dead_letters_go_long_after_their_death() {
            $crate::conformance::run(
 "lapsing::dead_letters_go_long_after_their_death",
 $crate::conformance::lapsing::dead_letters_go_long_after_their_death($harness)
 ).await;
        }

        // conformance: memory/retention-dead-letters: an event that its dead letter held back goes in the same run as that, by the age of its stream or its ttl
        // conformance: memory/retention-letter-reason: a dead letter that is purged while others need its event leaves a reason
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn dead_letters_hold_their_events_no_longer() {
            $crate::conformance::run(
 "lapsing::dead_letters_hold_their_events_no_longer",
 $crate::conformance::lapsing::dead_letters_hold_their_events_no_longer($harness)
 ).await;
        }

        // conformance: rule-7/lagging: retention waits for a group that lags, and for one that was declared meanwhile
        // conformance: fault-9/lagging: what a group has yet to reach is not pruned
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn retention_waits_for_those_who_lag() {
            $crate::conformance::run(
 "retention::retention_waits_for_those_who_lag",
 $crate::conformance::retention::retention_waits_for_those_who_lag($harness)
 ).await;
        }

        // conformance: rule-7/exactly: for random logs and policies exactly what is over the limits and needed by nobody goes
        // conformance: memory/retention-preview: a preview foretells what a run does and changes nothing
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn exactly_what_nobody_needs_goes() {
            $crate::conformance::run(
                "retention::exactly_what_nobody_needs_goes",
                $crate::conformance::retention::exactly_what_nobody_needs_goes(|| $harness)
            ).await;
        }

        // conformance: memory/retention-lease: of several processes one takes on the daily run
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_duty_is_taken_once() {
            $crate::conformance::run(
 "retention::a_duty_is_taken_once",
 $crate::conformance::retention::a_duty_is_taken_once($harness)
 ).await;
        }

        // conformance: memory/retention-clock-doubt: a clock that leaps by more than three days is in doubt until it has gone evenly for a day
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_clock_that_leaps_is_doubted() {
            $crate::conformance::run(
 "clock::a_clock_that_leaps_is_doubted",
 $crate::conformance::clock::a_clock_that_leaps_is_doubted($harness)
 ).await;
        }

        // conformance: memory/retention-clock-back: a clock that is put right is believed at once
        // conformance: memory/retention-clock-trust: an operator may say that the clock is right
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_clock_put_right_is_believed() {
            $crate::conformance::run(
 "clock::a_clock_put_right_is_believed",
 $crate::conformance::clock::a_clock_put_right_is_believed($harness)
 ).await;
        }

        // conformance: memory/retention-clock-doubt: the first look is compared with the newest event
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn the_first_look_goes_by_the_log() {
            $crate::conformance::run(
 "clock::the_first_look_goes_by_the_log",
 $crate::conformance::clock::the_first_look_goes_by_the_log($harness)
 ).await;
        }

        // conformance: memory/retention-audit: audit records go by an age of their own, never by default, and the trail stays whole
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn audit_records_go_by_their_age() {
            $crate::conformance::run(
 "retention::audit_records_go_by_their_age",
 $crate::conformance::retention::audit_records_go_by_their_age($harness)
 ).await;
        }

        // conformance: memory/retention-show: what there is, by type and kind
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn holdings_say_what_there_is() {
            $crate::conformance::run(
 "retention::holdings_say_what_there_is",
 $crate::conformance::retention::holdings_say_what_there_is($harness)
 ).await;
        }

        // conformance: handlers/inbox-record: an ack may write the event into the inbox of its group, and the record outlives a restart
        // conformance: outbox/3-check: before handling, a consumer can ask whether (event_id, consumer_name) exists
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn an_ack_on_record_is_remembered() {
            $crate::conformance::run(
 "inbox::an_ack_on_record_is_remembered",
 $crate::conformance::inbox::an_ack_on_record_is_remembered($harness)
 ).await;
        }

        // conformance: handlers/inbox-only-ack: a record is written only with an ack that is applied, never with a failure, skip, release or death
        // conformance: fault-8/only-ack: the record is not written before the effect, only with the ack
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn nothing_but_an_ack_is_recorded() {
            $crate::conformance::run(
 "inbox::nothing_but_an_ack_is_recorded",
 $crate::conformance::inbox::nothing_but_an_ack_is_recorded($harness)
 ).await;
        }

        // conformance: handlers/inbox-duplicate: an event that is on record is acked, and its follow-ups do not happen again
        // conformance: outbox/3-insert: after successful handling the record is inserted, once
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn what_was_handled_has_no_effect_again() {
            $crate::conformance::run(
 "inbox::what_was_handled_has_no_effect_again",
 $crate::conformance::inbox::what_was_handled_has_no_effect_again($harness)
 ).await;
        }

        // conformance: handlers/inbox-tenant: the same id in two tenants is two events
        // conformance: outbox/3-key: the same id in two tenants is two events
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn tenants_do_not_share_records() {
            $crate::conformance::run(
 "inbox::tenants_do_not_share_records",
 $crate::conformance::inbox::tenants_do_not_share_records($harness)
 ).await;
        }

        // conformance: handlers/inbox-group: a group that is removed and made again has handled nothing
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_group_made_anew_has_handled_nothing() {
            $crate::conformance::run(
 "inbox::a_group_made_anew_has_handled_nothing",
 $crate::conformance::inbox::a_group_made_anew_has_handled_nothing($harness)
 ).await;
        }

        // conformance: handlers/inbox-forget: records older than a given time are forgotten in small steps
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn old_records_are_forgotten() {
            $crate::conformance::run(
 "inbox::old_records_are_forgotten",
 $crate::conformance::inbox::old_records_are_forgotten($harness)
 ).await;
        }

        // conformance: handlers/inbox-refused: a settlement that is refused leaves no record
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_refused_settlement_leaves_no_record() {
            $crate::conformance::run(
 "inbox::a_refused_settlement_leaves_no_record",
 $crate::conformance::inbox::a_refused_settlement_leaves_no_record($harness)
 ).await;
        }

        // conformance: handlers/inbox-crash: after a crash an event is on record exactly if it was acked
        // conformance: fault-8: an event in flight at a crash is not taken for a duplicate
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_record_and_its_ack_survive_together() {
            $crate::conformance::run(
 "inbox::a_record_and_its_ack_survive_together",
 $crate::conformance::inbox::a_record_and_its_ack_survive_together($harness)
 ).await;
        }

        // conformance: handlers/exactly-once-engine: an effect that the engine cannot run is refused, nothing is applied, the lease is kept
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn an_effect_of_another_engine_is_refused() {
            $crate::conformance::run(
 "effects::an_effect_of_another_engine_is_refused",
 $crate::conformance::effects::an_effect_of_another_engine_is_refused($harness)
 ).await;
        }

        // conformance: handlers/exactly-once-together: effect, inbox record, follow-up events and ack commit together
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn an_effect_comes_with_its_ack() {
            $crate::conformance::run(
 "effects::an_effect_comes_with_its_ack",
 $crate::conformance::effects::an_effect_comes_with_its_ack($harness)
 ).await;
        }

        // conformance: handlers/exactly-once-ack: an effect runs only with an ack
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn an_effect_runs_only_with_an_ack() {
            $crate::conformance::run(
 "effects::an_effect_runs_only_with_an_ack",
 $crate::conformance::effects::an_effect_runs_only_with_an_ack($harness)
 ).await;
        }

        // conformance: handlers/exactly-once-failure: if the effect fails or panics nothing of its settlement happens, the event is tried again, others are not touched
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn an_effect_that_fails_undoes_its_settlement() {
            $crate::conformance::run(
 "effects::an_effect_that_fails_undoes_its_settlement",
 $crate::conformance::effects::an_effect_that_fails_undoes_its_settlement($harness)
 ).await;
        }

        // conformance: handlers/exactly-once-duplicate: an event that was handled is acked without its effect
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_duplicate_is_acked_without_its_effect() {
            $crate::conformance::run(
 "effects::a_duplicate_is_acked_without_its_effect",
 $crate::conformance::effects::a_duplicate_is_acked_without_its_effect($harness)
 ).await;
        }

        // conformance: handlers/exactly-once-follow-ups: a follow-up that is refused undoes the effect
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_refused_follow_up_undoes_the_effect() {
            $crate::conformance::run(
 "effects::a_refused_follow_up_undoes_the_effect",
 $crate::conformance::effects::a_refused_follow_up_undoes_the_effect($harness)
 ).await;
        }

        // conformance: handlers/depth: the depth of a stream is what the group that owes most of it still owes, counted up to a limit
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn the_depth_is_what_the_slowest_group_owes() {
            $crate::conformance::run(
 "streams::the_depth_is_what_the_slowest_group_owes",
 $crate::conformance::streams::the_depth_is_what_the_slowest_group_owes($harness)
 ).await;
        }

        // conformance: handlers/drop-oldest: the oldest events of a full stream are skipped with a reason in every group, and are settled by that
        // conformance: framework/backpressure-drop: the oldest events of a full stream are skipped with a reason in every group, and are settled by that
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn the_oldest_make_room_for_the_newest() {
            $crate::conformance::run(
 "streams::the_oldest_make_room_for_the_newest",
 $crate::conformance::streams::the_oldest_make_room_for_the_newest($harness)
 ).await;
        }

        // conformance: handlers/drop-oldest-in-flight: what is in flight is never dropped
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn what_is_in_flight_is_not_dropped() {
            $crate::conformance::run(
 "streams::what_is_in_flight_is_not_dropped",
 $crate::conformance::streams::what_is_in_flight_is_not_dropped($harness)
 ).await;
        }

        // conformance: handlers/drop-oldest-streams: events of other streams are not touched
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn other_streams_are_not_touched() {
            $crate::conformance::run(
 "streams::other_streams_are_not_touched",
 $crate::conformance::streams::other_streams_are_not_touched($harness)
 ).await;
        }

        // conformance: handlers/drop-oldest-groups: retries that wait go too, each group counted for itself
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn waiting_retries_go_in_every_group() {
            $crate::conformance::run(
 "streams::waiting_retries_go_in_every_group",
 $crate::conformance::streams::waiting_retries_go_in_every_group($harness)
 ).await;
        }

        // conformance: handlers/drop-oldest-key: in an ordered group the next of a key may go when the one before it is dropped
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn dropping_frees_the_key() {
            $crate::conformance::run(
 "streams::dropping_frees_the_key",
 $crate::conformance::streams::dropping_frees_the_key($harness)
 ).await;
        }

        // conformance: rule-7/dropped: what was dropped is owed to nobody, and retention may take it
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn retention_takes_what_was_dropped() {
            $crate::conformance::run(
 "streams::retention_takes_what_was_dropped",
 $crate::conformance::streams::retention_takes_what_was_dropped($harness)
 ).await;
        }

        // conformance: handlers/drop-oldest-crash: what a crash left waiting may be dropped
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn what_a_crash_left_may_be_dropped() {
            $crate::conformance::run(
 "streams::what_a_crash_left_may_be_dropped",
 $crate::conformance::streams::what_a_crash_left_may_be_dropped($harness)
 ).await;
        }

        // conformance: memory/redeliver: an event that a group is done with is delivered once more, in order, with fresh attempts; the group's position does not move
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_handled_event_comes_again_on_request() {
            $crate::conformance::run(
 "replay::a_handled_event_comes_again_on_request",
 $crate::conformance::replay::a_handled_event_comes_again_on_request($harness)
 ).await;
        }

        // conformance: memory/redeliver-owed: what a group still owes is not delivered twice, and what left the log is reported as gone
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn what_is_owed_is_not_delivered_twice() {
            $crate::conformance::run(
 "replay::what_is_owed_is_not_delivered_twice",
 $crate::conformance::replay::what_is_owed_is_not_delivered_twice($harness)
 ).await;
        }

        // conformance: memory/redeliver-unknown-group: a group that does not exist is given nothing, with an error
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn an_unknown_group_is_given_nothing() {
            $crate::conformance::run(
 "replay::an_unknown_group_is_given_nothing",
 $crate::conformance::replay::an_unknown_group_is_given_nothing($harness)
 ).await;
        }

        // conformance: memory/redeliver-isolated: a group without subscriptions gets what it is given, no live events, and holds retention back with nothing else
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_group_without_subscriptions_gets_only_what_it_is_given() {
            $crate::conformance::run(
 "replay::a_group_without_subscriptions_gets_only_what_it_is_given",
 $crate::conformance::replay::a_group_without_subscriptions_gets_only_what_it_is_given($harness)
 ).await;
        }

        // conformance: memory/redeliver-failure: a replayed delivery is retried and dead-lettered like any other, and stays marked
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_replayed_event_fails_like_any_other() {
            $crate::conformance::run(
 "replay::a_replayed_event_fails_like_any_other",
 $crate::conformance::replay::a_replayed_event_fails_like_any_other($harness)
 ).await;
        }

        // conformance: memory/redeliver-order: in an ordered group a replay keeps the order of its key
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_replay_keeps_the_order_of_its_key() {
            $crate::conformance::run(
 "replay::a_replay_keeps_the_order_of_its_key",
 $crate::conformance::replay::a_replay_keeps_the_order_of_its_key($harness)
 ).await;
        }

        // conformance: memory/redeliver-crash: what waits to be delivered once more survives a crash, still marked
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_replay_survives_a_crash() {
            $crate::conformance::run(
 "replay::a_replay_survives_a_crash",
 $crate::conformance::replay::a_replay_survives_a_crash($harness)
 ).await;
        }

        // conformance: memory/redeliver-inbox: the inbox absorbs the replay of what the group has on record as handled
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn the_inbox_absorbs_a_replay() {
            $crate::conformance::run(
 "replay::the_inbox_absorbs_a_replay",
 $crate::conformance::replay::the_inbox_absorbs_a_replay($harness)
 ).await;
        }

        // conformance: memory/redeliver-unwanted: events that no subscription of the group matches can be delivered, too
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn an_unwanted_event_can_be_given() {
            $crate::conformance::run(
 "replay::an_unwanted_event_can_be_given",
 $crate::conformance::replay::an_unwanted_event_can_be_given($harness)
 ).await;
        }

        // conformance: memory/checkpoints: a checkpoint is what was saved last under its name, and survives a crash
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_checkpoint_is_what_was_saved_last() {
            $crate::conformance::run(
 "replay::a_checkpoint_is_what_was_saved_last",
 $crate::conformance::replay::a_checkpoint_is_what_was_saved_last($harness)
 ).await;
        }

        // conformance: memory/audit-record: an audit record comes back whole: who, what, entity, when, correlation and trace ids; numbers have no gaps
        // conformance: framework/audit-what: an audit record comes back whole: who, what, entity, when, correlation and trace ids; numbers have no gaps
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_record_is_kept_whole() {
            $crate::conformance::run(
 "audit::a_record_is_kept_whole",
 $crate::conformance::audit::a_record_is_kept_whole($harness)
 ).await;
        }

        // conformance: memory/audit-bad-input: an audit entry without actor or action, or with too long a text, is refused and takes no number
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn entries_without_sense_are_refused() {
            $crate::conformance::run(
 "audit::entries_without_sense_are_refused",
 $crate::conformance::audit::entries_without_sense_are_refused($harness)
 ).await;
        }

        // conformance: memory/audit-query: the trail is asked by actor, action, entity and time, in both orders, page by page
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn the_trail_can_be_asked() {
            $crate::conformance::run(
 "audit::the_trail_can_be_asked",
 $crate::conformance::audit::the_trail_can_be_asked($harness)
 ).await;
        }

        // conformance: memory/audit-retention: retention removes from the beginning of the trail and leaves an anchor from which it is verified
        // conformance: framework/audit-append-only: retention removes from the beginning of the trail and leaves an anchor from which it is verified
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn forgetting_leaves_a_chain() {
            $crate::conformance::run(
 "audit::forgetting_leaves_a_chain",
 $crate::conformance::audit::forgetting_leaves_a_chain($harness)
 ).await;
        }

        // conformance: memory/audit-known-head: the trail is verified against a head that somebody kept elsewhere
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_head_kept_elsewhere_is_compared() {
            $crate::conformance::run(
 "audit::a_head_kept_elsewhere_is_compared",
 $crate::conformance::audit::a_head_kept_elsewhere_is_compared($harness)
 ).await;
        }

        // conformance: memory/audit-clock: a clock that jumps back does not make the times of the trail fall
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn times_in_the_trail_never_fall() {
            $crate::conformance::run(
 "audit::times_in_the_trail_never_fall",
 $crate::conformance::audit::times_in_the_trail_never_fall($harness)
 ).await;
        }

        // conformance: memory/audit-concurrent: records written at once each get a number, and none is missing
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn records_written_at_once_are_all_there() {
            $crate::conformance::run(
 "audit::records_written_at_once_are_all_there",
 $crate::conformance::audit::records_written_at_once_are_all_there($harness)
 ).await;
        }
        // conformance: contract/pause: a paused consumer gets nothing, others get its work, what it had not fetched is no attempt, and it goes on afterwards
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_paused_consumer_leaves_the_work_to_others() {
            $crate::conformance::run(
                "pausing::a_paused_consumer_leaves_the_work_to_others",
                $crate::conformance::pausing::a_paused_consumer_leaves_the_work_to_others($harness),
            )
            .await;
        }

        // conformance: contract/pause-membership: a paused consumer stays in its group: what it has a handler for is not without one
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_paused_consumer_stays_in_its_group() {
            $crate::conformance::run(
                "pausing::a_paused_consumer_stays_in_its_group",
                $crate::conformance::pausing::a_paused_consumer_stays_in_its_group($harness),
            )
            .await;
        }

        // conformance: contract/resume-prefetch: a consumer that resumes holds at most as many as it is told to
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_resumed_consumer_keeps_to_its_new_bound() {
            $crate::conformance::run(
                "pausing::a_resumed_consumer_keeps_to_its_new_bound",
                $crate::conformance::pausing::a_resumed_consumer_keeps_to_its_new_bound($harness),
            )
            .await;
        }

        // conformance: contract/pause-end: a paused consumer can be closed, and learns of the end of its engine
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_paused_consumer_can_end() {
            $crate::conformance::run(
                "pausing::a_paused_consumer_can_end",
                $crate::conformance::pausing::a_paused_consumer_can_end($harness),
            )
            .await;
        }

        // conformance: contract/claim-durability: what was acknowledged survives a crash as the engine says
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn durability_is_what_it_says() {
            $crate::conformance::run(
                "claims::durability_is_what_it_says",
                $crate::conformance::claims::durability_is_what_it_says($harness),
            )
            .await;
        }

        // conformance: contract/claim-exact-attempts: an engine that says its attempts are exact counts failures and lost leases, and neither releases nor what was given back
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn attempts_are_exact() {
            $crate::conformance::run(
                "claims::attempts_are_exact",
                $crate::conformance::claims::attempts_are_exact($harness),
            )
            .await;
        }

        // conformance: contract/claim-not-begun: what was claimed and never handed out is no attempt, and a consumer is handed about as much as it runs at once
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn what_has_not_begun_is_no_attempt() {
            $crate::conformance::run(
                "claims::what_has_not_begun_is_no_attempt",
                $crate::conformance::claims::what_has_not_begun_is_no_attempt($harness),
            )
            .await;
        }

        // conformance: contract/claim-native-delay: an engine that says it waits before a retry holds the event itself
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_delay_is_the_engines_own() {
            $crate::conformance::run(
                "claims::a_delay_is_the_engines_own",
                $crate::conformance::claims::a_delay_is_the_engines_own($harness),
            )
            .await;
        }

        // conformance: contract/claim-atomic-follow-ups: an engine that says verdict and follow-ups are one step applies neither if one follow-up is refused
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_refused_follow_up_refuses_the_verdict() {
            $crate::conformance::run(
                "claims::a_refused_follow_up_refuses_the_verdict",
                $crate::conformance::claims::a_refused_follow_up_refuses_the_verdict($harness),
            )
            .await;
        }

        // conformance: contract/claim-atomic-dead-letter: an engine that says dead letter and verdict are one step makes no dead letter of a refused verdict
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_lost_lease_makes_no_dead_letter() {
            $crate::conformance::run(
                "claims::a_lost_lease_makes_no_dead_letter",
                $crate::conformance::claims::a_lost_lease_makes_no_dead_letter($harness),
            )
            .await;
        }

        // conformance: contract/claim-deduplication: an engine that says it knows ids while events are kept knows them after a year
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn an_id_is_known_while_its_event_is_kept() {
            $crate::conformance::run(
                "claims::an_id_is_known_while_its_event_is_kept",
                $crate::conformance::claims::an_id_is_known_while_its_event_is_kept($harness),
            )
            .await;
        }

        // conformance: contract/position-everywhere: a position names one event in appends, deliveries, the log and as text
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_position_names_one_event_everywhere() {
            $crate::conformance::run(
                "positions::a_position_names_one_event_everywhere",
                $crate::conformance::positions::a_position_names_one_event_everywhere($harness),
            )
            .await;
        }

        // conformance: contract/cursor-resumes: a cursor that was kept as text goes on without gap or repetition, also in another process
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn a_cursor_goes_on_after_its_text_form() {
            $crate::conformance::run(
                "positions::a_cursor_goes_on_after_its_text_form",
                $crate::conformance::positions::a_cursor_goes_on_after_its_text_form($harness),
            )
            .await;
        }

        // conformance: bus/model: random publish, fetch, settle, crash and clock moves agree with a simple model in every step; a few plans, engines with one log run more
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn random_plans_agree_with_the_model() {
            $crate::conformance::run(
                "model::random_plans_agree_with_the_model",
                $crate::model::run_seeds(|| $harness, 101..=104, 150),
            )
            .await;
        }
        $crate::history_tests!($harness);
        $crate::outcome_tests!($harness);
        $crate::ephemeral_tests!($harness);
        $crate::store_tests!($harness);
        $crate::addressed_tests!($harness);
    };
}
