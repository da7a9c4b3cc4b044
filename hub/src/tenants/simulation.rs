//! Simulates home's Tenants and their members in memory, for tests and the benchmark. Each write succeeds
//! immediately.

use std::time::Duration;

use krypton_crds::tenant::{Tenant, TenantSpec};
use krypton_runtime::clock::BootTime;
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::tenant::{TenantKey, TenantReport};

use crate::leader::Leader;
use crate::members::tenant_reports::{
    ReportState, Target, Targets, TenantReportChanges, TenantReports,
};
use crate::tenants::controller::{NextWrite, TenantStore, TenantWrite};
use crate::tenants::status::{DecisionTime, TenantSettings};

/// Time between two reconciles. It exceeds every throttle.
const STEP: Duration = Duration::from_secs(10);

/// Members and their Tenants, with every status written.
#[derive(Debug)]
pub struct HomeSimulation {
    pub(super) store: TenantStore,
    pub(super) reports: TenantReports,
    pub(super) now: BootTime,
    tenants_per_member: usize,
    lead: Leader,
}

impl HomeSimulation {
    /// Creates members with so many ready Tenants each.
    pub fn new(members: usize, tenants_per_member: usize) -> Self {
        let mut home = Self {
            store: TenantStore::default(),
            reports: TenantReports::default(),
            now: BootTime(10 * STEP),
            tenants_per_member,
            lead: Leader::always_leading(),
        };
        home.reports.set_targets(targets(members));
        for number in 0..members {
            let name = member(number);
            home.reports.begin_full_report(&name, BootTime::default());
            home.report_all(number, true);
            home.reports.set_report_state(&name, ReportState::Complete);
            for tenant in 0..tenants_per_member {
                let key = simulated_key(number, tenant);
                let mut tenant = Tenant::new(&key.name, TenantSpec::default());
                tenant.metadata.namespace = Some(key.namespace.clone());
                tenant.metadata.resource_version = Some("1".to_owned());
                home.store.put(key, tenant, &home.reports);
            }
        }
        home.reconcile();
        home
    }

    /// Reports all Tenants of a member, ready or not.
    pub fn report_all(&self, number: usize, ready: bool) {
        let reports = (0..self.tenants_per_member)
            .map(|tenant| (simulated_key(number, tenant), Some(report(ready))));
        let changes = TenantReportChanges::new(reports.collect());
        self.reports.apply(&member(number), changes);
    }

    /// Makes a member silent, or brings it back.
    pub fn set_connected(&self, number: usize, connected: bool) {
        let report_state = match connected {
            true => ReportState::Complete,
            false => ReportState::Silent("no answer".to_owned()),
        };
        self.reports.set_report_state(&member(number), report_state);
    }

    /// Decides and writes every Tenant that is due; returns the number of decisions.
    pub fn reconcile(&mut self) -> u64 {
        self.now += STEP;
        let settings = settings();
        let dirty = self.reports.take_dirty(self.now);
        self.store.mark_affected(dirty, &self.reports, &settings);
        let previous = self.store.decisions;
        loop {
            let now = now(self.now);
            match self
                .store
                .next_write(&self.reports, &settings, &self.lead, now)
            {
                NextWrite::Write(key, tenant, TenantWrite::Status(status)) => {
                    let mut object = Tenant::clone(&tenant);
                    object.status = Some(*status);
                    self.store.simulate_write(&key, object, &self.reports);
                }
                // Nothing is placed here.
                NextWrite::Write(..) | NextWrite::Yield => {}
                NextWrite::Idle => return self.store.decisions - previous,
            }
        }
    }
}

pub(super) fn settings() -> TenantSettings {
    TenantSettings {
        self_cluster: false,
        allow_chart_skip: false,
        namespaces: None,
    }
}

pub(super) fn now(boot: BootTime) -> DecisionTime {
    DecisionTime {
        boot,
        wall: jiff::Timestamp::UNIX_EPOCH,
        in_startup_grace: false,
    }
}

pub(super) fn member(number: usize) -> String {
    format!("edge-{number:04}")
}

pub(super) fn simulated_key(member: usize, number: usize) -> TenantKey {
    TenantKey::new(format!("team-{member:04}"), format!("t{number}"))
}

pub(super) fn report(ready: bool) -> TenantReport {
    let ready = match ready {
        true => State::new(Truth::True, reason::INSTALLED, ""),
        false => State::new(Truth::False, reason::UPGRADING, "on its way"),
    };
    TenantReport::new(1, ready)
}

pub(crate) fn targets(members: usize) -> Targets {
    let target = |number| Target {
        cluster_uid: Some(format!("uid-of-{}", member(number))),
        ..Target::default()
    };
    let members = 0..members;
    members
        .map(|number| (member(number), target(number)))
        .collect()
}
