//! Names the program or user that caused a revision.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::tenant::{HistoryEntry, RevisionCause};
use krypton_helm::releases::revision::Revision;
use krypton_types::names;
use krypton_types::text::truncated;

use super::{is_entry_of, is_rollback, previous};
use crate::field_managers::{FieldManager, ObjectPart, last_manager};
use crate::plan::revisions::is_own_run;

/// Longest name of an actor, in bytes.
pub(super) const ACTOR_MAX: usize = 128;

/// The field managers that may have caused a revision.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Actors<'a> {
    /// The manager that changed the spec last.
    pub(super) spec: Option<FieldManager<'a>>,
    /// The manager that requested a reconcile last.
    pub(super) request: Option<FieldManager<'a>>,
    /// The field manager of the process that runs Helm.
    pub(super) program: &'a str,
    pub(super) owner: Owner,
}

/// The object that owns the release.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Owner {
    #[default]
    Tenant,
    /// A KryptonDeployment. Its spec contains no values. Its cluster and that of the release have different clocks, so
    /// a time alone does not show which run followed the last change.
    Deployment {
        generation: i64,
        /// Whether the newest recorded revision is on another cluster.
        has_moved: bool,
    },
}

impl<'a> Actors<'a> {
    pub(super) fn new(metadata: &'a ObjectMeta, program: &'a str) -> Self {
        Self {
            spec: last_manager(metadata, ObjectPart::Spec),
            request: last_manager(metadata, ObjectPart::ReconcileRequest),
            program,
            owner: Owner::Tenant,
        }
    }

    pub(super) fn of_deployment(
        metadata: &'a ObjectMeta,
        program: &'a str,
        has_moved: bool,
    ) -> Self {
        let generation = metadata.generation.unwrap_or_default();
        Self {
            owner: Owner::Deployment {
                generation,
                has_moved,
            },
            ..Self::new(metadata, program)
        }
    }

    /// Returns the actor of a revision with this cause; `None` if it is not known.
    pub(super) fn actor(
        &self,
        cause: RevisionCause,
        recorded: &[HistoryEntry],
        revisions: &[&Revision],
        revision: &Revision,
    ) -> Option<String> {
        let since = previous(revisions, revision);
        let within = |manager: &FieldManager<'_>| is_between(manager, since, revision);
        let (is_latest, lacks_values) = match self.owner {
            Owner::Tenant => (true, false),
            Owner::Deployment { generation, .. } => {
                (revision.generation() == Some(generation), true)
            }
        };
        let spec = || {
            let spec = self.spec.filter(within).filter(|_| is_latest);
            spec.map(|manager| manager.name)
        };
        let has_same_spec = has_same_generation(revisions, revision);
        let name = match cause {
            RevisionCause::Install if self.is_requested(recorded, revision) => spec(),
            RevisionCause::Install | RevisionCause::Repair | RevisionCause::Rollback => {
                Some(self.program)
            }
            _ if is_retry(cause, revisions, revision) => match self.request.filter(within) {
                Some(request) => Some(request.name),
                None if has_same_spec == Some(false) => spec(),
                None => Some(self.program),
            },
            RevisionCause::Chart => Some(names::HUB_MANAGER),
            RevisionCause::Values if has_same_spec == Some(true) || lacks_values => {
                Some(names::HUB_MANAGER)
            }
            RevisionCause::Values => spec(),
            RevisionCause::Retry | RevisionCause::Helm | RevisionCause::Unknown => None,
        };
        let name = truncated(name?.to_owned(), ACTOR_MAX);
        (!name.is_empty()).then_some(name)
    }

    /// Whether a change of the spec caused the installation: the release has no earlier history, or a KryptonDeployment
    /// has moved. Otherwise, another client has removed the release.
    fn is_requested(&self, recorded: &[HistoryEntry], revision: &Revision) -> bool {
        let has_moved = matches!(
            self.owner,
            Owner::Deployment {
                has_moved: true,
                ..
            }
        );
        has_moved || recorded.iter().all(|entry| is_entry_of(entry, revision))
    }
}

/// Whether the manager's last change can have caused the revision, because it happened after the previous one. A
/// manager that only removed fields owns none, so an earlier change of another manager must not count. All times are in
/// whole seconds, by the clock of the API server. For a KryptonDeployment, the two clusters have different clocks, so
/// this may miss a manager.
fn is_between(manager: &FieldManager<'_>, since: Option<&Revision>, revision: &Revision) -> bool {
    let second = manager.time.as_second();
    let created = |revision: &Revision| revision.created.map(|time| time.as_second());
    let is_after = since.is_none_or(|since| created(since).is_some_and(|since| since <= second));
    is_after && created(revision).is_some_and(|until| second <= until)
}

/// Whether the owner had the same spec at the previous run; `None` if a label does not show it.
fn has_same_generation(revisions: &[&Revision], revision: &Revision) -> Option<bool> {
    let mut older = revisions.iter().rev();
    let last_run =
        older.find(|other| other.revision < revision.revision && is_own_run(revisions, other))?;
    let is_same_owner = last_run.owner_uid == revision.owner_uid;
    Some(is_same_owner && last_run.generation()? == revision.generation()?)
}

/// Whether the revision repeats a failed one, perhaps after its rollback.
fn is_retry(cause: RevisionCause, revisions: &[&Revision], revision: &Revision) -> bool {
    match cause {
        RevisionCause::Retry => true,
        RevisionCause::Chart | RevisionCause::Values => repeats_rolled_back(revisions, revision),
        _ => false,
    }
}

fn repeats_rolled_back(revisions: &[&Revision], revision: &Revision) -> bool {
    let previous = previous(revisions, revision);
    let Some(rollback) = previous.filter(|previous| is_rollback(revisions, previous)) else {
        return false;
    };
    revisions.iter().any(|other| {
        other.rolled_back_by == Some(rollback.revision) && other.fingerprint == revision.fingerprint
    })
}
