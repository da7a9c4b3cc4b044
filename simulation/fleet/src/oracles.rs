//! The invariants of Krypton, each checked on the observations of a run.
//!
//! Create [`Oracles`] with the plan, pass each observation to [`Oracles::observe`], report phases with
//! [`Oracles::enter_phase`], and call [`Oracles::check_converged`] at the end of [`Phase::Quiet`]. The first violation
//! is the result of the run. Oracles know the stores only from [`Event::Change`], so histories in tests are lists of
//! observations.
//!
//! Two rules need more observations than the conductor makes. The preconditions of deletes need the body of a
//! request, and the deadlines of requests need its start.

mod content;
mod handover;
mod home;
mod hostile;
mod leases;
mod leaving;
mod liveness;
mod members;
mod people;
mod placed;
mod process;
mod releases;
mod status;
#[cfg(test)]
mod story;
mod upgrades;
mod view;

use std::fmt;

use krypton_sim_apiserver::server::Change;

use crate::observe::{Event, Observation};
use crate::plan::Plan;
use crate::time::Millis;

use releases::started_run;
pub use view::{Phase, View};
use view::{Run, Update, is_product, object_update};

/// Result of a check. The error is the reason for the violation, in one sentence.
pub type CheckResult = Result<(), String>;

/// An invariant. Its view already contains what it checks.
trait Oracle: fmt::Debug {
    fn name(&self) -> &'static str;

    fn check_observation(&mut self, _view: &View, _observation: &Observation) -> CheckResult {
        Ok(())
    }

    /// Checks any change of a store.
    fn check_change(&mut self, _view: &View, _cluster: &str, _change: &Change) -> CheckResult {
        Ok(())
    }

    /// Checks a change by Krypton or its Helm.
    fn check_product_change(
        &mut self,
        _view: &View,
        _cluster: &str,
        _change: &Change,
    ) -> CheckResult {
        Ok(())
    }

    /// Checks the change of an existing object.
    fn check_update(&mut self, _view: &View, _update: Update<'_>) -> CheckResult {
        Ok(())
    }

    /// Checks the start of a Helm run that may write.
    fn check_helm_start(&mut self, _view: &View, _run: &Run) -> CheckResult {
        Ok(())
    }

    /// Checks a write of a host's request. It follows the other checks of the same change.
    fn check_write(&mut self, _view: &View, _write: &AttributedWrite<'_>) -> CheckResult {
        Ok(())
    }

    /// Checks the state after the idle time, when everything must have converged.
    fn check_converged(&mut self, _view: &View) -> CheckResult {
        Ok(())
    }
}

/// A change of a store with the host that requested it.
#[derive(Clone, Copy, Debug)]
pub struct AttributedWrite<'a> {
    pub host: &'a str,
    pub cluster: &'a str,
    pub change: &'a Change,
}

/// A violated invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    pub oracle: &'static str,
    /// Milliseconds since the start of the simulation.
    pub at: Millis,
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, millis) = (self.at / 1000, self.at % 1000);
        let (oracle, text) = (self.oracle, &self.text);
        write!(f, "{seconds}.{millis:03} {oracle}: {text}")
    }
}

/// All invariants with the state that they share.
#[derive(Debug)]
pub struct Oracles {
    view: View,
    oracles: Vec<Box<dyn Oracle>>,
}

impl Oracles {
    pub fn new(plan: &Plan) -> Self {
        let oracles = create_oracles! {
            releases: LiveReleaseStays, OneHelmPerRelease, FinalizerPrecedesHelm,
                FinalizerOutlivesRelease, DeletedDeploymentWaits, ReleaseKeepsItsOwner,
                OrphanedReleaseStays, PausedTenantStays, PausedMemberStays, HelmRunsBackOff,
                HistoryIsBounded;
            upgrades: FailedUpgradeKeepsDeployed, RevisionsRise, LockedRevisionsStay,
                ObjectsOfReleaseStay, UidNeverChanges;
            leases: LeaseTakeoverWaits, HelmStartsUnderLease, HelmDiesWithLease,
                HubEpochNeverDecreases, EpochIsTakenOnce, LeaderWritesWhileFresh,
                RecordedStateNeverGoesBack, OnlyLeadersAct;
            members: OneMemberPerCluster, TwinRests, ClusterUidStays, SourceStays,
                PlacementStays, PlacedTenantGoesByOrder, HomeWaitsForPlacedTenant,
                MemberStaysInStatus, MovedDeploymentInstallsFirst;
            leaving: RetiredMembersGo, ReleasesPrecedeMember, DismissedMemberStaysAway,
                RebuiltClusterRests;
            people: ForeignFieldsStay, SpecsBelongToPeople, ObjectsOfPeopleStay,
                UnmarkedNamespacesStay, OccupiedNamespacesStay, CrdsStay, CaStays,
                SecretsStaySecret;
            status: ObservedGenerationIsTrue, ReadyFollowsDeployment, ConditionsAreUnique,
                StatusIsBounded;
            process: NoPanic, NoProcessEnds, ModelIsComplete, RequestsAreValid,
                AgentsStayOnTheirCluster, HubsNeedAKubeconfig, RequestsAreBounded,
                WritesChangeSomething;
            content: DeploymentsGetReady, RemovedDeploymentsGo, DeletedDeploymentsGo,
                ReleasesAreCurrent;
            handover: StoppedProcessEnds, StoppingLeaderHandsOver, AgentPrecedesProxy,
                HelmRunsToItsEnd, OutageChangesNoLeader, RestartChangesNothing;
            liveness: OneHubLeads, MembersConnect, SourcesAreRead, CrdsExist,
                CaRotationEnds, MemberLeasesAreHeld, DesiredStateIsApplied,
                WantedTenantsExist, DeletedTenantsGo, TenantsGetReady,
                ReleasesAreDeployed, NoReleaseStaysLocked, IdleFleetWritesNothing,
                IdleFleetRunsNoHelm;
            home: SeparatedMemberIsReported;
            placed: PlacedCopiesMatch, HeldCopiesStay, CopiesAreOnRecordedCluster,
                CopyKeepsItsOwner, TenantRunsOnItsMember, HomeShowsMembers,
                MembersCountTenants;
            hostile: NamedMemberCountsAlone, HostileAgentHarmsNoOther;
        };
        Self {
            view: View::new(plan),
            oracles,
        }
    }

    pub fn view(&self) -> &View {
        &self.view
    }

    /// Starts a phase of the run.
    pub fn enter_phase(&mut self, phase: Phase, at: Millis) {
        self.view.enter_phase(phase, at);
    }

    /// Checks an observation. Pass all observations of a run in order.
    ///
    /// # Errors
    /// The first violation.
    pub fn observe(&mut self, observation: &Observation) -> Result<(), Violation> {
        self.view.observe(observation);
        let at = observation.at;
        let checks = Checks::new(&self.view, observation);
        for oracle in &mut self.oracles {
            checks
                .run(oracle.as_mut())
                .map_err(|text| violation(oracle.as_ref(), at, text))?;
        }
        let (Event::Responded { host, cluster, .. } | Event::RequestLost { host, cluster, .. }) =
            &observation.event
        else {
            return Ok(());
        };
        for change in self.view.take_unattributed(cluster) {
            let write = AttributedWrite {
                host,
                cluster,
                change: &change,
            };
            for oracle in &mut self.oracles {
                oracle
                    .check_write(&self.view, &write)
                    .map_err(|text| violation(oracle.as_ref(), at, text))?;
            }
            self.view.record_write(&write);
        }
        Ok(())
    }

    /// Checks the state after the idle time.
    ///
    /// # Errors
    /// The first violation.
    pub fn check_converged(&mut self, at: Millis) -> Result<(), Violation> {
        self.view.advance(at);
        for oracle in &mut self.oracles {
            oracle
                .check_converged(&self.view)
                .map_err(|text| violation(oracle.as_ref(), at, text))?;
        }
        Ok(())
    }
}

/// The ways in which an oracle can check an observation.
struct Checks<'a> {
    view: &'a View,
    observation: &'a Observation,
    change: Option<(&'a str, &'a Change)>,
    product_change: Option<(&'a str, &'a Change)>,
    update: Option<Update<'a>>,
    helm_start: Option<&'a Run>,
}

impl<'a> Checks<'a> {
    fn new(view: &'a View, observation: &'a Observation) -> Self {
        let change = match &observation.event {
            Event::Change { cluster, change } => Some((cluster.as_str(), change)),
            _ => None,
        };
        Self {
            view,
            observation,
            change,
            product_change: change.filter(|(_, change)| is_product(&change.by)),
            update: object_update(observation),
            helm_start: started_run(view, observation),
        }
    }

    fn run(&self, oracle: &mut dyn Oracle) -> CheckResult {
        oracle.check_observation(self.view, self.observation)?;
        if let Some((cluster, change)) = self.change {
            oracle.check_change(self.view, cluster, change)?;
        }
        if let Some((cluster, change)) = self.product_change {
            oracle.check_product_change(self.view, cluster, change)?;
        }
        if let Some(update) = self.update {
            oracle.check_update(self.view, update)?;
        }
        match self.helm_start {
            Some(run) => oracle.check_helm_start(self.view, run),
            None => Ok(()),
        }
    }
}

fn violation(oracle: &dyn Oracle, at: Millis, text: String) -> Violation {
    Violation {
        oracle: oracle.name(),
        at,
        text,
    }
}

/// Fails with the text unless the rule holds.
fn ensure(holds: bool, text: impl FnOnce() -> String) -> CheckResult {
    match holds {
        true => Ok(()),
        false => Err(text()),
    }
}

/// Creates the oracles of these modules, in this order.
macro_rules! create_oracles {
    ($($module:ident: $($name:ident),+;)+) => {
        vec![$($(Box::<$module::$name>::default() as Box<dyn Oracle>),+),+]
    };
}
use create_oracles;

/// Declares an invariant: its state, its name, and its checks.
macro_rules! invariant {
    ($(#[$doc:meta])* $name:ident $({ $($state:tt)* })?, $text:literal, $($body:tt)*) => {
        $(#[$doc])*
        #[derive(Debug, Default)]
        pub(super) struct $name { $($($state)*)? }

        impl Oracle for $name {
            fn name(&self) -> &'static str {
                $text
            }

            $($body)*
        }
    };
}
use invariant;
