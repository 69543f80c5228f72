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
        $crate::scenario_tests! { $harness;
            // conformance: bus/order: order holds within the log for one consumer of a group
            consuming::events_come_in_the_order_of_the_log;
            // conformance: bus/wake-up: a publish wakes waiting consumers without polling
            consuming::a_waiting_fetch_is_woken_by_an_append;
            // conformance: bus/competing: consumers of one group compete; no event is delivered twice and all are handled
            // conformance: omni/why-parallel: consumers of one group share its events and handle them in parallel
            consuming::competing_consumers_share_and_never_double;
            // conformance: rule-2/groups: each group has its own position, attempts and dead letters
            // conformance: embedded/non-goal-groups: each group has its own position, attempts and dead letters
            consuming::groups_are_independent;
            // conformance: bus/prefetch: a consumer never holds more unsettled deliveries than its prefetch
            consuming::the_prefetch_bound_is_respected;
            // conformance: fault-10/cancelled-fetch: a fetch future that is dropped loses nothing and counts nothing
            consuming::dropping_a_fetch_loses_nothing;
            // conformance: fault-10/given-back: what was claimed and not fetched is given back without an attempt
            consuming::what_was_not_fetched_is_given_back;
            // conformance: rule-4/held: what fetch hands out is held, however long ago it was claimed
            consuming::what_is_handed_out_is_held;
            // conformance: bus/unknown-group: consuming a group that was not declared is an error
            consuming::an_unknown_group_cannot_be_consumed;
            // conformance: embedded/shutdown-error: publish and subscribe after shutdown give EventBusShutdownError
            consuming::after_close_everything_is_refused;
            // conformance: embedded/transitions: an event goes pending, processing, done, and a handled one never comes again
            settling::an_acked_event_is_done;
            // conformance: fault-5/cursor: a position never passes an unfinished earlier event
            settling::acks_out_of_order_pass_over_nothing;
            // conformance: embedded/retry-delay: a failed event is tried again after its delay, not before, with all its errors in order
            settling::a_failed_event_waits_out_its_delay;
            // conformance: rule-5/no-blocking: a failing event does not block others, each retry comes at its own time
            settling::waiting_events_come_each_at_its_time;
            // conformance: embedded/dlq-context: a dead letter keeps the original event, every error, the attempts and the time of the final failure
            settling::a_dead_lettered_event_is_kept_with_its_history;
            // conformance: bus/release: a released delivery comes again without an attempt counted
            settling::a_release_is_not_an_attempt;
            // conformance: rule-3/lease-end: a lease that ends gives the event back with the attempt counted and a crash recorded
            settling::a_lease_that_ends_counts_as_a_crash;
            // conformance: fault-7/zombie: a late ack cannot complete another worker's lease
            settling::a_late_settlement_is_refused;
            // conformance: rule-4/fenced: a lease that ended is lost even before another consumer has taken the event
            settling::a_settlement_after_the_lease_is_refused;
            // conformance: rule-4/once: a lease settles once, answers are per item
            settling::a_second_settlement_is_refused;
            // conformance: rule-4/extend: an extended lease is kept beyond its first end
            settling::an_extended_lease_is_kept;
            // conformance: bus/follow-ups: follow-up events are appended in one step with the verdict
            settling::follow_ups_are_appended_with_the_verdict;
            // conformance: contract/failure-follow-ups: follow-ups go with a retry, a dead letter and a skip; if one is refused nothing is applied and the lease is still held
            settling::follow_ups_go_with_a_failure;
            // conformance: rule-4/follow-ups: a settlement whose lease was lost appends nothing
            settling::follow_ups_of_a_lost_lease_are_not_appended;
            // conformance: rule-5/key: a failing event blocks those with the same key in an ordered group, until it is dead-lettered
            ordered::the_same_key_is_strictly_sequential;
            // conformance: rule-5/key-retried: a retried dead letter goes before the later events of its key
            ordered::a_retried_dead_letter_goes_before_its_key;
            // conformance: rule-5/key-consumers: the order by key holds between competing consumers and lost leases
            ordered::the_key_holds_between_consumers;
            // conformance: rule-5/key-random: under random verdicts every key is handled in order, and all of it
            ordered::random_work_keeps_every_key_in_order;
            // conformance: bus/settled-none: an event no group wants is settled at once
            settled::an_event_no_group_wants_is_settled;
            // conformance: bus/settled-later: settled covers the groups declared when the event was published
            settled::a_later_group_is_not_waited_for;
            // conformance: embedded/publish-awaits: a publisher can wait until every matching group has handled or dead-lettered its event
            settled::settled_waits_for_every_group;
            // conformance: bus/settled-skip: skipping settles, and so does removing the group
            settled::skipping_or_removing_the_group_settles;
            // conformance: bus/settled-timeout: a wait for settlement takes a timeout
            settled::a_wait_that_is_too_long_times_out;
            // conformance: bus/dedup: the same event twice returns the first receipt and stores nothing
            appending::the_same_event_twice_is_stored_once;
            // conformance: bus/id-reused: the same id with another body is IdReused
            appending::the_same_id_with_another_body_is_refused;
            // conformance: bus/dedup-batch: a batch may repeat an event
            appending::a_batch_may_repeat_an_event;
            // conformance: fault-2/atomic-batch: a batch that is refused stores nothing and acknowledges nothing
            appending::a_batch_is_stored_whole_or_not_at_all;
            // conformance: bus/tenant-ids: ids are unique per tenant
            appending::ids_are_unique_per_tenant;
            // conformance: embedded/payload: payloads of 1 MB and odd ones come out byte for byte as they went in
            // conformance: embedded/metadata: metadata comes out as it went in, in a delivery and by the event's id
            appending::odd_payloads_come_out_as_they_went_in;
            // conformance: bus/odd-types: types with spaces, without dots, of 255 characters are carried
            appending::odd_types_are_carried;
            // conformance: bus/log: the log can be read, searched and waited on without a group
            // conformance: omni/why-persisted: events stay in the log and can be read again
            appending::the_log_can_be_read_without_a_group;
            // conformance: embedded/shutdown-load: closing while many publish forgets nothing that was acknowledged
            appending::closing_under_load_forgets_nothing_acknowledged;
            // conformance: bus/start-new: a group that starts at new gets what is published from then on
            groups::start_from_new;
            // conformance: bus/start-first: a group that starts at first gets everything there is
            groups::start_from_first;
            // conformance: bus/start-last: a group that starts at last begins with the newest matching event
            groups::start_from_last;
            // conformance: bus/start-time: a group that starts at a time begins with the first event received then or later
            groups::start_from_a_time;
            // conformance: bus/durable-group: an existing group keeps its position and subscription ids
            groups::an_existing_group_keeps_its_position;
            // conformance: embedded/glob: a group gets the events its glob patterns match and skips the others
            groups::unmatched_events_are_skipped;
            // conformance: bus/widening: a new pattern applies from the group's position on
            groups::widening_is_not_retroactive;
            // conformance: bus/system: the system's own events are left out of the star
            groups::system_events_are_left_out_of_the_star;
            // conformance: embedded/unsubscribe: an unsubscribed pattern gets nothing new, what was handed out stays owed
            groups::retracting_mid_flight_keeps_what_is_owed;
            // conformance: bus/remove-group: a removed group takes its position, deliveries and dead letters with it
            groups::a_removed_group_leaves_nothing_behind;
            // conformance: bus/no-handler-here: an event whose handler is not registered here is left to other processes
            groups::an_event_without_a_handler_is_left_to_others;
            // conformance: rule-9/no-handler: a type that no process has a handler for is dead-lettered after a configurable time, never acked by falling through
            // conformance: fault-4/no-handler: an event no process handles becomes a dead letter after a configurable time, never an ack
            groups::an_event_without_a_handler_is_dead_lettered_in_the_end;
            // conformance: embedded/restart: after a restart settled events stay settled and the rest comes again
            restart::a_restart_keeps_everything;
            // conformance: embedded/crash-recovery: events in flight at a crash go back to waiting with their attempt counted
            restart::a_crash_keeps_everything;
            // conformance: bus/restart-identity: ids are recognised and positions go on after a restart
            restart::identity_and_positions_survive;
            // conformance: rule-3/attempts: attempts are durable before the handler runs
            // conformance: bus/attempts-durable: attempts are durable before the handler runs
            restart::every_crash_is_counted;
            // conformance: bus/clock-back: a clock that is set back neither loses nor reorders events
            restart::a_clock_set_back_keeps_the_order;
            // conformance: embedded/dlq-list: dead letters are listed newest first with offset and limit, 100 by default
            dead_letters::pages_by_offset_and_by_key_agree;
            // conformance: bus/dlq-filters: dead letters are filtered by type, group, event and time
            dead_letters::filters_select;
            // conformance: embedded/dlq-retry: a retried dead letter is reset in full and goes only to the group that failed
            // conformance: bus/dlq-retry-own-group: a retried dead letter is reset in full and goes only to the group that failed
            // conformance: omni/dlq-retry: a retried dead letter is reset in full and goes only to the group that failed
            dead_letters::a_retry_goes_to_the_group_that_failed;
            // conformance: bus/dlq-again: a retried dead letter that fails again is the same row, attempts add up
            dead_letters::a_retried_dead_letter_that_fails_again_is_the_same;
            // conformance: bus/dlq-retry-many: many dead letters are retried by filter at once
            dead_letters::many_are_retried_at_once;
            // conformance: embedded/dlq-purge: purge deletes dead events up to and including the cutoff of creation
            dead_letters::purging_is_inclusive;
            // conformance: bus/dlq-purge-died: purge may go by the time of death
            // conformance: embedded/dlq-at: purge may go by the time of death
            dead_letters::purging_by_time_of_death;
            // conformance: rule-7/purge: purging takes no event another group owes work on
            dead_letters::purging_leaves_what_others_owe;
            // conformance: memory/stages-kept: stages are kept by event and stage with sizes, status, details and flags, oldest first
            payloads::stages_are_kept_by_event_and_stage;
            // conformance: memory/stages-need-event: a stage needs its event, and an id is that of one tenant
            payloads::a_stage_needs_its_event;
            // conformance: memory/stages-largest: the largest stages come largest first, only those over the limit
            payloads::the_largest_stages_come_first;
            // conformance: memory/stages-deleted: stages are deleted with their event
            payloads::stages_go_with_their_event;
            // conformance: memory/overflow-noted: an event that is removed leaves a note of its object in the same step
            payloads::a_removed_event_leaves_a_note_of_its_object;
            // conformance: memory/overflow-same-payload: the same id with the same payload is silent success under any threshold, with another payload IdReused
            payloads::a_repeated_publish_is_told_by_the_whole_payload;
            // conformance: memory/overflow-note-first: an object is noted before it is put; the append of its event strikes the note off in the same step
            payloads::the_append_of_an_event_strikes_off_the_note_of_its_object;
            // conformance: memory/dlq-notice: an event system.dead_letter is published for each dead letter
            // conformance: omni/dlq-alert: system.dead_letter {eventId, eventType, error} is published, never for a system.* event
            notices::every_dead_letter_is_told_of;
            // conformance: memory/dlq-notice-ways: whatever makes a dead letter, the event that tells of it is in the same step
            notices::every_way_to_die_is_told;
            // conformance: memory/dlq-notice-again: a dead letter that was retried and fails again is told of again
            notices::dying_again_is_told_again;
            // conformance: memory/dlq-notice-atomic: a settlement that is refused tells of nothing
            notices::a_refused_settlement_tells_of_nothing;
            // conformance: memory/dlq-notice-size: a long error is cut in the notice and kept in the dead letter
            notices::a_long_error_is_cut_in_the_notice;
            // conformance: memory/dlq-filter: dead letters are chosen by tenant, handler, error and time of death
            reviving::dead_letters_are_chosen_by_why_they_died;
            // conformance: memory/dlq-tally: what fails alike is counted by group, type and error
            reviving::a_tally_counts_what_fails_alike;
            // conformance: memory/dlq-retry-some: dead letters are retried a few at a time, oldest first
            // conformance: framework/dlq-replay-count: so many dead letters are replayed and no more
            reviving::a_few_are_retried_oldest_first;
            // conformance: memory/dlq-retry-order: the order of a key is kept when dead letters are retried
            reviving::retried_events_of_a_key_keep_their_order;
            // conformance: memory/dlq-edit: a corrected event replaces a dead letter in the group that failed; the original is kept, both are linked
            reviving::a_corrected_event_replaces_a_dead_letter;
            // conformance: memory/dlq-edit-reaches: the failing group gets the corrected event once, whatever it wants by now
            reviving::a_correction_finds_its_group;
            // conformance: memory/dlq-edit-refused: a correction that is none changes nothing
            reviving::what_cannot_replace_a_dead_letter_is_refused;
            // conformance: memory/dlq-edit-order: a corrected event stands at the end of its key
            reviving::a_correction_keeps_the_order_of_its_key;
            // conformance: bus/inspect: position, lag, in flight, waiting and dead letters of a group are right
            upkeep::the_numbers_of_a_group_are_right;
            // conformance: contract/lag-matching: a group is behind by the events that match, told apart by type and stream, and by no others
            upkeep::a_group_is_not_behind_by_what_it_does_not_want;
            // conformance: embedded/states: an event has exactly one state in every group
            upkeep::every_event_has_one_state_per_group;
            // conformance: fault-9/retention: retention never removes what a group owes work on, nor a dead letter
            upkeep::retention_removes_nothing_that_a_group_needs;
            // conformance: bus/retention: retention by age and length takes the oldest
            upkeep::retention_by_age_and_by_length;
            // conformance: memory/retention-streams: each stream has an age of its own, the first that matches counts
            // conformance: omni/stream-retention: events go after the ages of the stream table, 30/90/7/7/30/7 days
            retention::streams_have_ages_of_their_own;
            // conformance: memory/ttl: an event that says when it expires goes then, follow-ups too, unless a group owes work on it
            // conformance: workflow/ttl: TTL on the ttl attribute
            retention::events_go_when_they_expire;
            // conformance: memory/retention-dead-letters: dead letters go 30 days after death, or never; their events stay
            // conformance: memory/retention-letter-reason: a group whose dead letter went by its age has skipped the event with a reason, until it gets it once more
            // conformance: omni/dead-letter-age: dead letter payloads are kept 30 days
            lapsing::dead_letters_go_long_after_their_death;
            // conformance: memory/retention-dead-letters: an event that its dead letter held back goes in the same run as that, by the age of its stream or its ttl
            // conformance: memory/retention-letter-reason: a dead letter that is purged while others need its event leaves a reason
            lapsing::dead_letters_hold_their_events_no_longer;
            // conformance: rule-7/lagging: retention waits for a group that lags, and for one that was declared meanwhile
            // conformance: fault-9/lagging: what a group has yet to reach is not pruned
            retention::retention_waits_for_those_who_lag;
        }

        // conformance: rule-7/exactly: for random logs and policies retention removes exactly the events that are over the limits and that no group needs
        // conformance: memory/retention-preview: a preview foretells what a run does and changes nothing
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn exactly_what_no_group_needs_goes() {
            if !$crate::conformance::is_available(&$harness) {
                return;
            }
            $crate::conformance::run(
                "retention::exactly_what_no_group_needs_goes",
                $crate::conformance::retention::exactly_what_no_group_needs_goes(|| $harness),
            )
            .await;
        }

        $crate::scenario_tests! { $harness;
            // conformance: memory/retention-clock-doubt: a clock that leaps by more than three days is in doubt until it has gone evenly for a day
            clock::a_clock_that_leaps_is_doubted;
            // conformance: memory/retention-clock-back: a clock that is put right is believed at once
            // conformance: memory/retention-clock-trust: an operator may say that the clock is right
            clock::a_clock_put_right_is_believed;
            // conformance: memory/retention-clock-doubt: the first look is compared with the newest event
            clock::the_first_look_goes_by_the_log;
            // conformance: memory/retention-audit: audit records go by an age of their own, never by default, and the trail stays whole
            retention::audit_records_go_by_their_age;
            // conformance: memory/retention-show: what there is, by type and kind
            retention::holdings_say_what_there_is;
            // conformance: handlers/inbox-record: an ack may write the event into the inbox of its group, and the record outlives a restart
            // conformance: outbox/3-check: before handling, a consumer can ask whether (event_id, consumer_name) exists
            inbox::an_ack_on_record_is_remembered;
            // conformance: handlers/inbox-only-ack: a record is written only with an ack that is applied, never with a failure, skip, release or death
            // conformance: fault-8/only-ack: the record is not written before the effect, only with the ack
            inbox::nothing_but_an_ack_is_recorded;
            // conformance: handlers/inbox-duplicate: an event that is on record is acked, and its follow-ups do not happen again
            // conformance: outbox/3-insert: after successful handling the record is inserted, once
            inbox::what_was_handled_has_no_effect_again;
            // conformance: handlers/inbox-tenant: the same id in two tenants is two events
            // conformance: outbox/3-key: the same id in two tenants is two events
            inbox::tenants_do_not_share_records;
            // conformance: handlers/inbox-group: a group that is removed and made again has handled nothing
            inbox::a_group_made_anew_has_handled_nothing;
            // conformance: handlers/inbox-forget: records older than a given time are forgotten in small steps
            inbox::old_records_are_forgotten;
            // conformance: handlers/inbox-refused: a settlement that is refused leaves no record
            inbox::a_refused_settlement_leaves_no_record;
            // conformance: handlers/inbox-crash: after a crash an event is on record exactly if it was acked
            // conformance: fault-8: an event in flight at a crash is not taken for a duplicate
            inbox::a_record_and_its_ack_survive_together;
            // conformance: handlers/exactly-once-engine: an effect that the engine cannot run is refused, nothing is applied, the lease is kept
            effects::an_effect_of_another_engine_is_refused;
            // conformance: handlers/exactly-once-together: effect, inbox record, follow-up events and ack commit together
            effects::an_effect_comes_with_its_ack;
            // conformance: handlers/exactly-once-ack: an effect runs only with an ack
            effects::an_effect_runs_only_with_an_ack;
            // conformance: handlers/exactly-once-failure: if the effect fails or panics nothing of its settlement happens, the event is tried again, others are not touched
            effects::an_effect_that_fails_undoes_its_settlement;
            // conformance: handlers/exactly-once-duplicate: an event that was handled is acked without its effect
            effects::a_duplicate_is_acked_without_its_effect;
            // conformance: handlers/exactly-once-follow-ups: a follow-up that is refused undoes the effect
            effects::a_refused_follow_up_undoes_the_effect;
            // conformance: handlers/depth: the depth of a stream is what the group that owes most of it still owes, counted up to a limit
            streams::the_depth_is_what_the_slowest_group_owes;
            // conformance: handlers/drop-oldest: the oldest events of a full stream are skipped with a reason in every group, and are settled by that
            // conformance: framework/backpressure-drop: the oldest events of a full stream are skipped with a reason in every group, and are settled by that
            streams::the_oldest_make_room_for_the_newest;
            // conformance: handlers/drop-oldest-in-flight: what is in flight is never dropped
            streams::what_is_in_flight_is_not_dropped;
            // conformance: handlers/drop-oldest-streams: events of other streams are not touched
            streams::other_streams_are_not_touched;
            // conformance: handlers/drop-oldest-groups: retries that wait go too, each group counted for itself
            streams::waiting_retries_go_in_every_group;
            // conformance: handlers/drop-oldest-key: in an ordered group the next of a key may go when the one before it is dropped
            streams::dropping_frees_the_key;
            // conformance: rule-7/dropped: no group owes a dropped event, and retention may remove it
            streams::retention_takes_what_was_dropped;
            // conformance: handlers/drop-oldest-crash: what a crash left waiting may be dropped
            streams::what_a_crash_left_may_be_dropped;
            // conformance: memory/redeliver: an event that a group is done with is delivered once more, in order, with fresh attempts; the group's position does not move
            replay::a_handled_event_comes_again_on_request;
            // conformance: memory/redeliver-owed: what a group still owes is not delivered twice, and what left the log is reported as gone
            replay::what_is_owed_is_not_delivered_twice;
            // conformance: memory/redeliver-unknown-group: a group that does not exist is given nothing, with an error
            replay::an_unknown_group_is_given_nothing;
            // conformance: memory/redeliver-isolated: a group without subscriptions gets what it is given, no live events, and holds retention back with nothing else
            replay::a_group_without_subscriptions_gets_only_what_it_is_given;
            // conformance: memory/redeliver-failure: a replayed delivery is retried and dead-lettered like any other, and stays marked
            replay::a_replayed_event_fails_like_any_other;
            // conformance: memory/redeliver-order: in an ordered group a replay keeps the order of its key
            replay::a_replay_keeps_the_order_of_its_key;
            // conformance: memory/redeliver-crash: what waits to be delivered once more survives a crash, still marked
            replay::a_replay_survives_a_crash;
            // conformance: memory/redeliver-inbox: the inbox absorbs the replay of what the group has on record as handled
            replay::the_inbox_absorbs_a_replay;
            // conformance: memory/redeliver-unwanted: events that no subscription of the group matches can be delivered, too
            replay::an_unwanted_event_can_be_given;
            // conformance: memory/checkpoints: a checkpoint is what was saved last under its name, and survives a crash
            replay::a_checkpoint_is_what_was_saved_last;
            // conformance: memory/audit-record: an audit record comes back whole: who, what, entity, when, correlation and trace ids; numbers have no gaps
            // conformance: framework/audit-what: an audit record comes back whole: who, what, entity, when, correlation and trace ids; numbers have no gaps
            audit::a_record_is_kept_whole;
            // conformance: memory/audit-bad-input: an audit entry without actor or action, or with too long a text, is refused and takes no number
            audit::entries_without_sense_are_refused;
            // conformance: memory/audit-query: the trail is asked by actor, action, entity and time, in both orders, page by page
            audit::the_trail_can_be_asked;
            // conformance: memory/audit-retention: retention removes from the beginning of the trail and leaves an anchor from which it is verified
            // conformance: framework/audit-append-only: retention removes from the beginning of the trail and leaves an anchor from which it is verified
            audit::forgetting_leaves_a_chain;
            // conformance: memory/audit-known-head: the trail is verified against a head that an operator keeps elsewhere
            audit::a_head_kept_elsewhere_is_compared;
            // conformance: memory/audit-clock: a clock that jumps back does not make the times of the trail fall
            audit::times_in_the_trail_never_fall;
            // conformance: memory/audit-concurrent: records written at once each get a number, and none is missing
            audit::records_written_at_once_are_all_there;
            // conformance: contract/pause: a paused consumer gets nothing, others get its work, what it had not fetched is no attempt, and it goes on afterwards
            pausing::a_paused_consumer_leaves_the_work_to_others;
            // conformance: contract/pause-membership: a paused consumer stays in its group: what it has a handler for is not without one
            pausing::a_paused_consumer_stays_in_its_group;
            // conformance: contract/resume-prefetch: a consumer that resumes holds at most as many as it is told to
            pausing::a_resumed_consumer_keeps_to_its_new_bound;
            // conformance: contract/pause-end: a paused consumer can be closed, and learns of the end of its engine
            pausing::a_paused_consumer_can_end;
            // conformance: contract/claim-durability: what was acknowledged survives a crash as the engine says
            claims::durability_is_what_it_says;
            // conformance: contract/claim-exact-attempts: an engine that says its attempts are exact counts failures and lost leases, and neither releases nor what was given back
            claims::attempts_are_exact;
            // conformance: contract/claim-not-begun: what was claimed and never handed out is no attempt, and a consumer is handed about as much as it runs at once
            claims::what_has_not_begun_is_no_attempt;
            // conformance: contract/claim-native-delay: an engine that says it waits before a retry holds the event itself
            claims::a_delay_is_the_engines_own;
            // conformance: contract/claim-atomic-follow-ups: an engine that says verdict and follow-ups are one step applies neither if one follow-up is refused
            claims::a_refused_follow_up_refuses_the_verdict;
            // conformance: contract/claim-atomic-dead-letter: an engine that says dead letter and verdict are one step makes no dead letter of a refused verdict
            claims::a_lost_lease_makes_no_dead_letter;
            // conformance: contract/claim-deduplication: an engine that says it knows ids while events are kept knows them after a year
            claims::an_id_is_known_while_its_event_is_kept;
            // conformance: contract/position-everywhere: a position names one event in appends, deliveries, the log and as text
            positions::a_position_names_one_event_everywhere;
            // conformance: contract/cursor-resumes: a cursor that was kept as text goes on without gap or repetition, also in another process
            positions::a_cursor_goes_on_after_its_text_form;
        }

        // conformance: bus/model: random publish, fetch, settle, crash and clock moves agree with a simple model in every step; a few plans, engines with one log run more
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn random_plans_agree_with_the_model() {
            if !$crate::conformance::is_available(&$harness) {
                return;
            }
            $crate::conformance::run(
                "model::random_plans_agree_with_the_model",
                $crate::model::run_seeds(|| $harness, 101..=104, 150),
            )
            .await;
        }
        $crate::history_tests!($harness);
        $crate::later_tests!($harness);
    };
}

/// The scenarios of the history alone, for an engine with other settings of its indexes.
#[macro_export]
#[doc(hidden)]
macro_rules! history_tests {
    ($harness:expr) => {
        $crate::scenario_tests! { $harness;
            // conformance: memory/history-patterns: events are found by tenant; entity; app; app+entity; type+tenant; type+tenant+entity; type+tenant+app; all four; in both directions
            // conformance: workflow/access-patterns: the eight access patterns of the table of keys
            history::every_pattern_finds_its_events;
            // conformance: memory/history-range: since and until are inclusive, by the time of receipt
            history::since_and_until_are_inclusive;
            // conformance: memory/history-cursors: cursors stay stable while events are appended and removed
            history::cursors_stay_where_they_are;
            // conformance: memory/history-bad-queries: queries that make no sense are clear errors
            history::queries_that_make_no_sense_are_refused;
            // conformance: memory/history-names: names are compared whole, whatever characters they have
            history::names_are_compared_whole;
            // conformance: memory/history-large: a page of large events ends early and goes on in the next
            history::a_page_of_large_events_ends_early;
            // conformance: memory/history-random: random events and queries give the pages of a plain scan
            history::random_queries_give_the_pages_of_a_scan;
            // conformance: workflow/state-single: the latest event of a task, newest first and limit 1
            // conformance: workflow/state-by-type: all events of a type in a tenant
            // conformance: workflow/state-history: all events of a task in order
            // conformance: workflow/state-job: all events of a job, and the latest of each of its tasks
            history::the_states_of_tasks_can_be_asked;
        }
    };
}

/// The scenarios of abilities that were added later.
#[macro_export]
#[doc(hidden)]
macro_rules! later_tests {
    ($harness:expr) => {
        $crate::scenario_tests! { $harness;
            // conformance: contract/attempts-kept: an event that failed twice and then worked, or was skipped, keeps its failures with handler, duration and worker
            outcomes::an_event_that_failed_and_then_worked_keeps_its_failures;
            // conformance: contract/attempts-nothing: an event that works at its first attempt leaves no record of its attempts
            outcomes::an_event_that_simply_works_leaves_nothing;
            // conformance: contract/attempts-dead-letter: a dead letter that was retried and then worked keeps its failures and those of the retry
            outcomes::a_retried_dead_letter_keeps_the_failures_of_all_its_runs;
            // conformance: contract/attempts-replay: a replayed event keeps the failures of every run
            outcomes::a_replayed_event_keeps_the_failures_of_every_run;
            // conformance: contract/attempts-gone: what is kept of attempts goes with its event and with its group
            outcomes::what_is_kept_of_attempts_goes_with_its_event_and_group;
            // conformance: contract/ephemeral-gone: an ephemeral group is gone after its engine was closed, and after a crash
            ephemeral::an_ephemeral_group_goes_with_its_engine;
            // conformance: contract/ephemeral-retention: retention removes what an ephemeral group has not reached, and keeps what it has in flight
            ephemeral::an_ephemeral_group_never_pins_the_log;
            // conformance: contract/ephemeral-given-up: what an ephemeral group gives up is skipped with the reason, and is no dead letter
            ephemeral::what_an_ephemeral_group_gives_up_is_skipped;
            // conformance: contract/ephemeral-conflict: a group that lasts is not taken for an ephemeral one, nor the other way round
            ephemeral::an_ephemeral_group_is_not_taken_for_one_that_lasts;
            // conformance: contract/store-ingest: an event is ingested once, keeps the time at which its broker received it, and is found by id, in the log and in the history
            store::an_event_is_ingested_once;
            // conformance: contract/store-ingest-first: of two bodies under one id the store keeps the first, and this is no error
            store::the_first_body_of_an_id_is_kept;
            // conformance: contract/store-times: times of receipt never fall in a store, whatever a broker says
            store::times_never_fall_in_a_store;
            // conformance: contract/store-failures: failures that were recorded come back in order, each once, until the group is done with the event
            store::recorded_failures_come_back_in_order;
            // conformance: contract/store-inbox: what was recorded as handled is seen by the inbox, for that group alone
            store::what_was_recorded_as_handled_is_in_the_inbox;
            // conformance: contract/store-skip: a recorded skip says its reason, and the group is not behind
            store::a_recorded_skip_says_why;
            // conformance: contract/store-bury: a dead letter that another process puts is listed, counted, marked as retried and opened again; told twice it is one
            store::a_dead_letter_can_be_put;
            // conformance: contract/store-no-pin: nothing that a store is told keeps an event from being removed, open dead letters apart
            store::what_a_store_is_told_pins_nothing;
            // conformance: contract/store-early-stages: a payload stage that comes before its event waits for it
            store::a_stage_waits_for_its_event;
            // conformance: contract/address-only: an event that is addressed to a group reaches that group and no other, whether the others are caught up or behind
            addressed::an_addressed_event_reaches_its_group_alone;
            // conformance: contract/address-order: an addressed event comes in its turn, and in its place of an ordered group
            addressed::an_addressed_event_comes_in_its_turn;
            // conformance: contract/address-settled: settled waits for the addressed group alone
            addressed::settled_waits_for_the_addressed_group_alone;
            // conformance: contract/address-owed: an addressed event is owed by its group alone: it is not counted in other groups' streams, and retention does not wait for them
            addressed::other_groups_do_not_owe_an_addressed_event;
            // conformance: contract/address-same-body: the address belongs to the event: the same id for another group is another event
            addressed::the_address_belongs_to_the_event;
            // conformance: contract/address-replace: edit-and-retry addresses the corrected event to the group that failed; groups that come later pass it by, too
            addressed::a_correction_is_addressed_to_the_group_that_failed;
            // conformance: contract/kv-put: a value by key is what was put last, byte for byte, with a revision that grows
            kv::a_value_is_what_was_put_last;
            // conformance: contract/kv-revision: a put may expect a revision or absence; of several at once one succeeds, and a revision is never used again
            kv::a_put_can_expect_a_revision;
            // conformance: contract/kv-expiry: a value with a time to live is gone after it
            kv::a_value_expires;
            // conformance: contract/kv-watch: a watcher sees what is there, then puts, deletions and expiry
            kv::a_watcher_sees_the_changes;
            // conformance: contract/kv-crash: values and revisions survive a crash
            kv::values_survive_a_crash;
        }
    };
}

/// One test for each scenario of the list, under the name of its function.
#[macro_export]
#[doc(hidden)]
macro_rules! scenario_tests {
    ($harness:expr; $($module:ident::$name:ident;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            let harness = $harness;
            if !$crate::conformance::is_available(&harness) {
                return;
            }
            $crate::conformance::run(
                concat!(stringify!($module), "::", stringify!($name)),
                $crate::conformance::$module::$name(harness),
            )
            .await;
        }
    )*};
}
