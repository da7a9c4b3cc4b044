//! Evaluates a member after each change: selects its reporter, and derives the presence of its agent and its health from
//! the reports.

use std::collections::BTreeMap;
use std::time::Duration;

use krypton_runtime::clock::BootTime;
use krypton_runtime::newest::{Newest as _, SendIfChanged as _};
use krypton_types::conditions::{State, Truth, reason};

use super::{Reporter, ReporterId, SILENCE};
use crate::leader::raise_epoch;
use crate::members::LockedMember;
use crate::members::claims::ClaimDelay;
use crate::members::health::{MemberHealth, health};

const UNCONFIRMED: &str = "the member reports a later desired state, and no other member confirms it; if home was \
    restored from a backup, delete Secret krypton-system/krypton-desired-state on the member, or wait six hours";
/// Time for which an oversized response stays in the condition. Longer than any retry back-off.
const OVERSIZED_SHOWN: Duration = Duration::from_secs(5 * 60);

impl LockedMember<'_> {
    /// Selects the reporter, and updates the stores from its reports.
    pub(super) fn reevaluate(&mut self, now: BootTime) {
        self.select(now);
        self.update_presence(now);
        let health = self.health(now);
        self.observe(|observation| health.apply_to(observation));
        if let Some(report_state) = health.report_state {
            self.registry
                .reports
                .set_report_state(self.name, report_state);
        }
        // A full report of orders may be complete although the Tenants cannot be listed.
        let complete = self.reporters().selected().is_some_and(|selected| {
            let report = selected.report;
            selected.complete && report.is_some_and(|report| report.connected && report.ready)
        });
        if complete {
            self.registry.deployments.finish_full_report(self.name);
            self.registry.placements.finish_full_report(self.name);
        }
    }

    fn select(&mut self, now: BootTime) {
        let reporters = self.reporters();
        let selected = selected(&reporters.all, reporters.selected);
        if selected == reporters.selected {
            return;
        }
        // The reports of the next reporter replace the previous reports.
        if let Some(previous) = reporters.selected.and_then(|id| reporters.all.get_mut(&id)) {
            previous.missed_changes = true;
        }
        reporters.selected = selected;
        if let Some(reporter) = selected.and_then(|id| reporters.all.get_mut(&id)) {
            if reporter.missed_changes {
                reporter.request_full_report(now);
            }
            tracing::debug!(member = self.name, ?selected, "reporter selected");
            self.begin_full_report(now);
        }
    }

    fn update_presence(&mut self, now: BootTime) {
        let reporters = self.reporters();
        let ready = reporters.agents().any(Reporter::is_ready);
        let last_able = reporters.agents().filter_map(|reporter| reporter.last_able);
        let last_able = last_able.chain(reporters.last_able).max();
        let presence = reporters.presence.get();
        let next = presence.next(ready, last_able.unwrap_or(now));
        reporters.presence.send_if_changed(next);
    }

    fn health(&mut self, now: BootTime) -> MemberHealth {
        let reporters = self.reporters();
        let is_shown = |(_, last): &(String, BootTime)| now < *last + OVERSIZED_SHOWN;
        reporters.oversized_response = reporters.oversized_response.take().filter(is_shown);
        let oversized_response = reporters.oversized_response.clone();
        let silent = now.since(reporters.last_agent_report) >= SILENCE;
        let may_reconnect = reporters.selected.is_none() && !silent;
        let mut health = health(
            reporters.selected(),
            reporters.connection.as_ref(),
            reporters.held_back.as_ref(),
            reporters.presence.get(),
            silent,
        );
        let report = reporters.selected().and_then(|selected| selected.report);
        let held_back = reporters.held_back.is_some();
        let is_writing = report.is_some_and(|report| report.writing) && !held_back;
        if may_reconnect {
            let at = reporters.last_agent_report + SILENCE;
            self.reevaluate_at(at);
        }
        if let Some((message, last)) = oversized_response {
            self.reevaluate_at(last + OVERSIZED_SHOWN);
            if !held_back {
                let state = State::new(Truth::False, reason::LIMIT_EXCEEDED, message);
                health.healthy = Some(state);
            }
        }
        self.judge_claim(is_writing, &mut health, now);
        health
    }

    /// Follows a member's claim of an epoch that this hub has not issued, once the claim is credible.
    fn judge_claim(&mut self, is_writing: bool, health: &mut MemberHealth, now: BootTime) {
        let has_record = is_writing && (health.ahead.is_some() || health.applied.is_some());
        let (ahead, fleet) = (&self.registry.ahead, &mut *self.fleet);
        let epoch_claims = &mut fleet.epoch_claims;
        epoch_claims.record(self.name, has_record.then_some(health.ahead));
        let latest = epoch_claims.latest_claim(self.name, fleet.epoch, ahead.get());
        let claims = &mut self.reporters().claims;
        let Some((claimed, confirmed)) = latest else {
            return claims.end_claim();
        };
        match claims.follow(now, confirmed) {
            Ok(()) => raise_epoch(ahead, claimed),
            Err(ClaimDelay::BackOff(at)) => self.reevaluate_at(at),
            Err(ClaimDelay::Unconfirmed(at)) => {
                let state = State::new(Truth::False, reason::STALE, UNCONFIRMED);
                health.healthy = Some(state);
                self.reevaluate_at(at);
            }
        }
    }

    fn reevaluate_at(&mut self, at: BootTime) {
        self.fleet.due.insert((at, self.name.to_owned()));
        self.registry.due_changed.notify_one();
    }
}

/// Selects the reporter: the Lease holder, otherwise one that can reach the cluster, otherwise any. Among
/// equals it prefers an agent, then the current reporter, then the newest session.
fn selected(
    reporters: &BTreeMap<ReporterId, Reporter>,
    current: Option<ReporterId>,
) -> Option<ReporterId> {
    let rank = |reporter: &Reporter| match &reporter.report {
        None => 0,
        Some(report) if !report.connected => 1,
        Some(report) if !report.synced => 2,
        Some(report) if !report.writing => 3,
        Some(_) => 4,
    };
    reporters
        .iter()
        .max_by_key(|(id, reporter)| {
            let agent = **id != ReporterId::Proxy;
            (rank(reporter), agent, Some(**id) == current, **id)
        })
        .map(|(id, _)| *id)
}
