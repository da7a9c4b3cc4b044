//! Simulates home's Tenants and their members in memory, for tests and the benchmark. Each write succeeds
//! immediately.

use std::time::Duration;

use krypton_crds::tenant::{Tenant, TenantSpec};
use krypton_runtime::clock::BootTime;
use krypton_types::conditions::{ClusterState, State, Truth, reason};
use krypton_types::tenant::{TenantKey, TenantReport};

use crate::leader::Leader;
use crate::members::tenant_reports::{Changed, Hearing, Reports, Target, Targets};
use crate::tenants::controller::{Change, TenantStore, Turn};
use crate::tenants::status::{Now, Rules};

/// Two steps are so far apart that nothing waits for its pace.
const STEP: Duration = Duration::from_secs(10);

/// Members and their Tenants, with every status written.
#[derive(Debug)]
pub struct Rehearsal {
    pub(super) store: TenantStore,
    pub(super) reports: Reports,
    pub(super) now: BootTime,
    each: usize,
    lead: Leader,
}

impl Rehearsal {
    /// So many members with so many Tenants each.
    pub fn new(members: usize, each: usize) -> Self {
        let mut home = Self {
            store: TenantStore::default(),
            reports: Reports::default(),
            now: BootTime(10 * STEP),
            each,
            lead: Leader::alone(),
        };
        home.reports.set_targets(targets(members));
        for number in 0..members {
            let name = member(number);
            home.reports.begin(&name, BootTime::default());
            home.says(number, true);
            home.reports.hearing(&name, Hearing::Full);
            for tenant in 0..each {
                let key = tenant_of(number, tenant);
                let mut tenant = Tenant::new(&key.name, TenantSpec::default());
                tenant.metadata.namespace = Some(key.namespace.clone());
                tenant.metadata.resource_version = Some("1".to_owned());
                home.store.put(key, tenant, &home.reports);
            }
        }
        home.decides();
        home
    }

    /// A member reports all its Tenants, ready or not.
    pub fn says(&self, number: usize, ready: bool) {
        let said = (0..self.each).map(|tenant| (tenant_of(number, tenant), Some(report(ready))));
        let said = Changed::new(said.collect());
        self.reports.report(&member(number), said);
    }

    /// Makes a member silent, or brings it back.
    pub fn is_heard(&self, number: usize, heard: bool) {
        let hearing = match heard {
            true => Hearing::Full,
            false => Hearing::Silent("no answer".to_owned()),
        };
        self.reports.hearing(&member(number), hearing);
    }

    /// Decides and writes every Tenant that is due; returns the number of decisions.
    pub fn decides(&mut self) -> u64 {
        self.now = BootTime(self.now.0 + STEP);
        let rules = rules();
        let dirty = self.reports.take_dirty(self.now);
        self.store.take_in(dirty, &self.reports, &rules);
        let before = self.store.decided();
        loop {
            let now = now(self.now);
            match self.store.next(&self.reports, &rules, &self.lead, now) {
                Turn::Write(key, tenant, Change::Status(status)) => {
                    let mut object = Tenant::clone(&tenant);
                    object.status = Some(*status);
                    self.store.was_written(&key, object, &self.reports);
                }
                // Nothing is placed here.
                Turn::Write(..) | Turn::Yield => {}
                Turn::Rest => return self.store.decided() - before,
            }
        }
    }
}

pub(super) fn rules() -> Rules {
    Rules {
        self_cluster: false,
        allow_chart_skip: false,
        namespaces: None,
    }
}

pub(super) fn now(boot: BootTime) -> Now {
    Now {
        boot,
        wall: jiff::Timestamp::UNIX_EPOCH,
        patient: false,
    }
}

pub(super) fn member(number: usize) -> String {
    format!("edge-{number:04}")
}

pub(super) fn tenant_of(member: usize, number: usize) -> TenantKey {
    TenantKey {
        namespace: format!("team-{member:04}"),
        name: format!("t{number}"),
    }
}

pub(super) fn report(ready: bool) -> TenantReport {
    let ready = match ready {
        true => State::new(Truth::True, reason::INSTALLED, ""),
        false => State::new(Truth::False, reason::UPGRADING, "on its way"),
    };
    TenantReport {
        observed_generation: 1,
        applied_chart: String::new(),
        next: None,
        state: ClusterState::from(ready),
    }
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
