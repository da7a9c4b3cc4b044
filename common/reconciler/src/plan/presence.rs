//! Plans the next action for a Tenant or KryptonDeployment that is not deleted.

use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{ORIGINALS_NAMESPACE, Status};
use krypton_types::conditions::{ClusterState, State, Truth, reason};
use krypton_types::desired::handling::WaitPolicy;
use krypton_types::tenant::Step;
use krypton_types::{names, values};

use super::repair::{self, Remedy, inherited};
use super::{
    Action, Coming, Failure, Ownership, Permit, Plan, Remediation, Run, View, state, waiting,
};
use crate::owner::ReleaseOwner;
use crate::status::throttle::QUIET;

const INSTALLING: &str = "installing release";
const UPGRADING: &str = "upgrading release";

pub(super) fn plan(view: &View<'_>) -> Plan {
    if let Some(refusal) = refused(view) {
        return Plan::wait(refusal);
    }
    if let Some(refusal) = values_refused(view) {
        return refusal;
    }
    let next = match (view.ownership(), view.newest()) {
        (Ownership::Theirs(message), _) => {
            return Plan::wait(failed(
                reason::RELEASE_IN_USE,
                &message,
                reason::RELEASE_IN_USE,
            ));
        }
        (Ownership::Unread, Some(newest)) => {
            attempt(view, Action::ReadRelease(newest.revision), Run::Upgrade)
        }
        _ => next(view),
    };
    let held = match (&view.permit, view.paused()) {
        (_, Some(why)) => Some((reason::PAUSED, why.to_owned())),
        (Permit::Withheld(why), _) => Some((reason::LOCKED, why.clone())),
        (Permit::Granted, None) => None,
    };
    match held {
        // The sweep can wait, and does not affect the state of the release.
        Some(_) if matches!(next.action, Action::Sweep(_)) => Plan {
            action: Action::Nothing,
            ..next
        },
        // These actions change nothing on the member, so they need no permit.
        Some((why, message)) if !changes_nothing(&next.action) => held_back(view, why, message),
        // The next step does not happen while the permit is missing or a pause lasts.
        Some(_) => Plan { next: None, ..next },
        None => next,
    }
}

fn changes_nothing(action: &Action) -> bool {
    matches!(action, Action::Nothing | Action::ReadRelease(_))
}

/// Reports that the action waits for a permit or for the end of a pause. The readiness of the deployed revision is
/// still updated.
fn held_back(view: &View<'_>, why: &str, message: String) -> Plan {
    let said = view.said().unwrap_or_else(|| ClusterState {
        ready: state(Truth::Unknown, why, "not looked after yet"),
        progress: None,
        error: None,
    });
    let (action, ready) = followed(view, said.ready);
    let progress = Some(state(Truth::False, why, message));
    let state = ClusterState {
        ready,
        progress,
        ..said
    };
    Plan::new(action, state)
}

/// Returns the readiness of the deployed revision, and the action that reads the revision if it is unread.
fn followed(view: &View<'_>, said: State) -> (Action, State) {
    let deployed = view
        .newest()
        .filter(|newest| newest.status == Status::Deployed);
    match deployed {
        Some(newest) if view.read(newest).is_none() => (Action::ReadRelease(newest.revision), said),
        Some(_) => (Action::Nothing, readiness(view, said)),
        None => (Action::Nothing, said),
    }
}

/// Returns the readiness of the running release while an attempt fails before Helm starts; `None` if it was not
/// ready.
pub(super) fn kept(view: &View<'_>) -> Option<(Action, State)> {
    let said = view.said()?.ready;
    let deployed = |newest: &Revision| newest.status == Status::Deployed;
    let follows = view.newest().is_some_and(deployed) && view.ownership() == Ownership::Mine;
    if follows && (said.truth == Truth::True || said.reason == reason::NOT_READY) {
        return Some(followed(view, said));
    }
    (said.truth == Truth::True).then_some((Action::Nothing, said))
}

/// Evaluates the workloads of a deployed revision although another action is due. The condition of a failed attempt
/// stays.
fn readiness(view: &View<'_>, said: State) -> State {
    let wait = view.desired.handling.wait;
    let was_ready = said.truth == Truth::True;
    let of_workloads = [reason::NOT_READY, reason::INSTALLING, reason::UPGRADING];
    match (wait, view.unready) {
        (WaitPolicy::Ready, Some(detail)) if was_ready || said.reason == reason::NOT_READY => {
            state(Truth::False, reason::NOT_READY, detail)
        }
        (WaitPolicy::Ready, Some(_)) => said,
        (_, unready) => {
            let mut now = match of_workloads.contains(&said.reason.as_str()) {
                true => state(Truth::True, reason::NO_CHANGE, "release ready"),
                false => said,
            };
            if now.truth == Truth::True {
                now.message = waiting::told(&now.message, wait, unready);
            }
            now
        }
    }
}

/// Returns the error state if the release must not use its workspace. A Helm run cannot fix that.
fn refused(view: &View<'_>) -> Option<ClusterState> {
    let workspace = &view.release_key.namespace;
    if !names::is_dns_label(workspace) {
        let message = format!(
            "{workspace:?} cannot be a namespace (a DNS label of at most 63 characters); {}",
            elsewhere(view, "set spec.workspace")
        );
        return Some(failed(
            reason::WORKSPACE_INVALID,
            &message,
            reason::WORKSPACE_INVALID,
        ));
    }
    let owner = if workspace.starts_with("kube-") {
        "Kubernetes"
    } else if workspace == "krypton-system" || view.policy.protected_namespaces.contains(workspace)
    {
        "Krypton"
    } else {
        return not_own(view);
    };
    let message = format!(
        "namespace {workspace} belongs to {owner} and is never a workspace; {}",
        elsewhere(
            view,
            "delete the Tenant, and create it anew with another spec.workspace"
        )
    );
    Some(failed(
        reason::NAMESPACE_NOT_OWNED,
        &message,
        reason::NAMESPACE_NOT_OWNED,
    ))
}

/// Returns the error state if lockdown forbids the workspace to the owner. An existing release stays unchanged.
fn not_own(view: &View<'_>) -> Option<ClusterState> {
    if view.may_use_workspace(view.owner) {
        return None;
    }
    let (workspace, of) = (&view.release_key.namespace, view.owner.namespace());
    let message = format!(
        "namespace {workspace} is neither {of}, where this {} is, nor was it made for it; {}, or have an operator of \
         the cluster annotate the namespace with {}={of}/{}",
        view.owner.kind(),
        elsewhere(view, "make the Tenant anew with another spec.workspace"),
        names::ADOPT_ANNOTATION,
        view.owner.name(),
    );
    Some(after_failure(view, reason::NAMESPACE_NOT_OWNED, &message).state)
}

/// Returns the fix for an unusable workspace. A KryptonDeployment's name determines its workspace.
fn elsewhere(view: &View<'_>, of_tenant: &'static str) -> &'static str {
    match view.owner {
        ReleaseOwner::Tenant(_) => of_tenant,
        ReleaseOwner::Deployment(_) => "make the KryptonDeployment anew under another name",
    }
}

/// Rejects values of the Tenant that the fleet does not allow or that are too large. Without them, Krypton would
/// install another release than the user requested, so an existing release stays unchanged.
fn values_refused(view: &View<'_>) -> Option<Plan> {
    let own = view.owner.values();
    let own = own.filter(|own| !own.is_empty())?;
    if !view.desired.tenant_values {
        let message = "the fleet takes no values of single Tenants: remove spec.values, or have the hub run with --tenant-values";
        return Some(after_failure(view, reason::VALUES_NOT_ALLOWED, message));
    }
    let sizes = [
        ("spec.values are", own, values::MOST_BYTES_OF_TENANT),
        (
            "with spec.values, all values are",
            &view.chart.values,
            values::MOST_BYTES,
        ),
    ];
    sizes.into_iter().find_map(|(what, values, most)| {
        let size = values::size(values);
        let message = format!("{what} {size} bytes as JSON, more than {most}: shorten spec.values");
        (size > most).then(|| after_failure(view, reason::VALUES_TOO_LARGE, &message))
    })
}

fn next(view: &View<'_>) -> Plan {
    let newest = view.newest();
    let current = newest.map(|newest| currency(view, newest));
    // Until a revision has been deployed, the run is an installation.
    let deployed =
        |revision: &&Revision| matches!(revision.status, Status::Deployed | Status::Superseded);
    let run = if view.revisions.iter().any(deployed) {
        Run::Upgrade
    } else {
        Run::Install
    };

    if view.owner.tenant().is_some() && !view.has_finalizer() {
        return Plan::new(Action::AddFinalizer, announced(view, current, run));
    }
    match view.workspace {
        None if newest.is_none() => {
            return attempt(view, Action::CreateWorkspace, run);
        }
        // The watch has not shown the namespace of the release yet: wait for the watch.
        None => return Plan::wait(announced(view, current, run)),
        Some(workspace) if workspace.terminating => {
            let message = format!(
                "namespace {} is being deleted; waiting until it is gone",
                view.release_key.namespace
            );
            return Plan::wait(failed(
                reason::WORKSPACE_TERMINATING,
                &message,
                reason::WORKSPACE_TERMINATING,
            ));
        }
        Some(_) => {}
    }
    let Some(newest) = newest else {
        return attempt(view, Action::Helm(run), run);
    };
    match repair::row(repair::found(view.revisions)).present {
        Remedy::Compare => match current {
            Some(Currency::Current | Currency::Unread) if must_read(view, newest) => {
                attempt(view, Action::ReadRelease(newest.revision), run)
            }
            Some(Currency::Current) => match unrecorded(view, newest) {
                Some(true) => attempt(view, Action::Helm(run), run),
                Some(false) => attempt(view, Action::ReadRelease(newest.revision), run),
                None => settled(view, newest),
            },
            _ => attempt(view, Action::Helm(run), run),
        },
        Remedy::Apply => attempt(view, Action::Helm(run), run),
        Remedy::InstallAgain => attempt(view, Action::InstallAgain, Run::Install),
        Remedy::Unlock => attempt(view, unlock(newest), run),
        Remedy::BreakLock => locked(view, newest, run),
        // Only `Ask` gets here. `Uninstall` and `LetGo` are for deleted Tenants, and a read handles `SetAside`.
        Remedy::Uninstall | Remedy::LetGo | Remedy::SetAside | Remedy::Ask => {
            let message = format!(
                "revision {} of release {} is in a state that helm does not name; look at it with helm history",
                newest.revision, view.release_key.name
            );
            Plan::wait(failed(reason::LOCKED, &message, reason::LOCKED))
        }
    }
}

/// Whether to read the newest revision first. Its manifest lists the workloads that must be ready, and a new process
/// has not read it yet.
fn must_read(view: &View<'_>, newest: &Revision) -> bool {
    view.read(newest).is_none() || view.memory.doubted == Some(newest.revision)
}

/// Returns whether the newest revision was read with the permit, if it has no record. Helm must render such a
/// revision again: Krypton does not heal from it, and an uninstallation would skip its hooks.
fn unrecorded(view: &View<'_>, newest: &Revision) -> Option<bool> {
    let (revision, with_permit) = view.memory.unrecorded?;
    let signed = newest.run.is_some() && !inherited(view.revisions, newest);
    let counts = revision == newest.revision && signed && view.permit == Permit::Granted;
    counts.then_some(with_permit)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Currency {
    Current,
    Outdated,
    /// The labels are not sufficient: Krypton must read the revision.
    Unread,
}

/// Whether the newest revision is as desired. Krypton's label takes precedence. Without it, the Go operator's
/// annotation counts if chart name and version agree.
fn currency(view: &View<'_>, newest: &Revision) -> Currency {
    if let Some(label) = &newest.fingerprint {
        let same = label == view.fingerprint && !inherited(view.revisions, newest);
        return if same {
            Currency::Current
        } else {
            Currency::Outdated
        };
    }
    let chart = view.chart;
    let adoptable = match view.owner {
        ReleaseOwner::Tenant(_) => view
            .original_fingerprint()
            .is_some_and(|value| chart.is_original_fingerprint(value)),
        // The Go operator left no mark, and set these values for every chart.
        ReleaseOwner::Deployment(_) => {
            let values = &chart.values;
            values.is_empty()
                || (values.len() == 1 && values.get("replicaCount") == Some(&1.into()))
        }
    };
    if !adoptable {
        return Currency::Outdated;
    }
    match view.read(newest) {
        None => Currency::Unread,
        Some(facts) => {
            let plain = |version: &str| version.trim_start_matches('v').to_owned();
            let same = view.is_of_our_chart(facts)
                && (chart.version.is_empty()
                    || plain(&facts.chart_version) == plain(&chart.version));
            if same {
                Currency::Current
            } else {
                Currency::Outdated
            }
        }
    }
}

fn unlock(newest: &Revision) -> Action {
    Action::Unlock {
        revision: newest.revision,
        was: newest.status.to_string(),
    }
}

/// Plans for a locked release. Krypton immediately breaks a lock that its dead run left, because the permit excludes
/// another live run. It breaks any other lock only after a grace period. An uninstallation leaves no run mark.
fn locked(view: &View<'_>, newest: &Revision, run: Run) -> Plan {
    let signed = newest.run.is_some() && !inherited(view.revisions, newest);
    let rolled_back = |former: &&Revision| {
        former.revision < newest.revision && former.rolled_back_by == Some(newest.revision)
    };
    let ours = signed || view.revisions.iter().any(rolled_back);
    if ours && newest.status.is_pending() {
        return attempt(view, unlock(newest), run);
    }
    let since = match view.memory.locked {
        Some((revision, since)) if revision == newest.revision => since,
        _ => view.now,
    };
    let grace = view.policy.foreign_lock_grace;
    if view.now.since(since) >= grace {
        return attempt(view, unlock(newest), run);
    }
    let message = format!(
        "release {} is {}: somebody else's helm is at work; it is taken over after {} s",
        view.release_key.name,
        newest.status,
        grace.as_secs()
    );
    let mut waiting = announced(view, None, run);
    waiting.progress = Some(state(Truth::True, reason::LOCKED, message));
    let end = krypton_runtime::clock::BootTime(since.0 + grace);
    Plan {
        wake: Some(end),
        next: Some(Coming {
            step: Step::Unlock,
            at: Some(end),
            attempts: 0,
        }),
        ..Plan::wait(waiting)
    }
}

/// Plans the action now, or after the back-off of the last failure.
fn attempt(view: &View<'_>, action: Action, run: Run) -> Plan {
    // Giving up does not stop an unlock, because all other actions depend on it.
    let unlocks = matches!(action, Action::Unlock { .. });
    let currency = match action {
        Action::ReadRelease(_) => Currency::Unread,
        _ => Currency::Outdated,
    };
    match view.failure() {
        Some(failure) if !unlocks && is_given_up(view, failure) => given_up(view, failure),
        Some(failure) if view.now < failure.retry_at => Plan {
            wake: Some(failure.retry_at),
            next: Coming::retry(failure),
            ..after_failure(view, failure.reason, &failure.message)
        },
        _ => Plan::new(action, announced(view, Some(currency), run)),
    }
}

/// Whether Krypton has given up. Only a change of the chart, the values or the Tenant, or a user's request, starts
/// another attempt.
fn is_given_up(view: &View<'_>, failure: &Failure) -> bool {
    let over = view
        .policy
        .retries
        .is_some_and(|most| failure.attempts > most);
    let rolls_back = view.policy.remediation == Remediation::Rollback;
    match failure.reason {
        reason::ROLLBACK_FAILED => true,
        reason::INSTALL_FAILED => over,
        reason::UPGRADE_FAILED => over || (rolls_back && failure.permanent),
        _ => false,
    }
}

fn given_up(view: &View<'_>, failure: &Failure) -> Plan {
    let state = after_failure(view, failure.reason, &failure.message).state;
    let failed = view
        .newest()
        .filter(|newest| newest.status == Status::Failed);
    let good = repair::last_good(view.revisions);
    if let (Remediation::Rollback, Some(_), Some(good)) = (view.policy.remediation, failed, good) {
        return if failure.reason == reason::ROLLBACK_FAILED && view.now < failure.retry_at {
            Plan {
                wake: Some(failure.retry_at),
                next: Coming::retry(failure),
                ..Plan::wait(state)
            }
        } else {
            Plan::new(Action::Rollback(good.revision), state)
        };
    }
    let message = format!(
        "{}; given up after {} attempts, until chart, values or {} change or annotation {} is set",
        failure.message,
        failure.attempts,
        view.owner.kind(),
        names::RECONCILE_REQUESTED_ANNOTATION
    );
    Plan {
        next: Some(Coming {
            step: Step::GivenUp,
            at: None,
            attempts: failure.attempts,
        }),
        ..after_failure(view, failure.reason, &message)
    }
}

/// Waits after a failed attempt. If Krypton could not fetch the chart or start Helm, the running release keeps its
/// readiness.
fn after_failure(view: &View<'_>, why: &str, message: &str) -> Plan {
    if why == reason::SUSPENDED {
        return Plan::wait(ClusterState {
            ready: state(Truth::Unknown, why, message),
            progress: Some(state(Truth::False, why, message)),
            error: Some(no_error()),
        });
    }
    let running = view
        .revisions
        .iter()
        .rev()
        .find(|revision| revision.status == Status::Deployed);
    let message = match running {
        Some(revision) => format!("{message} (revision {} keeps running)", revision.revision),
        None => message.to_owned(),
    };
    let before_helm = [
        reason::CHART_NOT_LOADED,
        reason::VERSION_NOT_FOUND,
        reason::VERSION_INVALID,
        reason::HELM_UNAVAILABLE,
        reason::VALUES_NOT_ALLOWED,
        reason::VALUES_TOO_LARGE,
    ]
    .contains(&why);
    let mut after = Plan::wait(failed(why, &message, why));
    if before_helm
        && running.is_some()
        && let Some((action, ready)) = kept(view)
    {
        after.state.ready = ready;
        let waits = |failure: &Failure| failure.reason != why && view.now < failure.retry_at;
        // The read itself may fail.
        if why != reason::HELM_UNAVAILABLE && !view.failure().is_some_and(waits) {
            after.action = action;
        }
    }
    after
}

/// Returns the state to report before an action.
fn announced(view: &View<'_>, current: Option<Currency>, run: Run) -> ClusterState {
    if matches!(current, Some(Currency::Current | Currency::Unread)) {
        // Nothing changes, so the last reported state stays.
        return view.said().unwrap_or_else(|| ClusterState {
            ready: state(Truth::Unknown, reason::NO_CHANGE, "looking at the release"),
            progress: None,
            error: None,
        });
    }
    let (why, message) = match run {
        Run::Install => (reason::INSTALLING, INSTALLING),
        Run::Upgrade => (reason::UPGRADING, UPGRADING),
    };
    // An error stays until an attempt succeeds.
    let error = view
        .said()
        .and_then(|said| said.error)
        .filter(|error| error.truth == Truth::True && is_helm_or_chart(&error.reason));
    ClusterState {
        ready: state(Truth::False, why, message),
        progress: Some(state(Truth::True, why, message)),
        error: Some(error.unwrap_or_else(no_error)),
    }
}

fn is_helm_or_chart(why: &str) -> bool {
    [
        reason::INSTALL_FAILED,
        reason::UPGRADE_FAILED,
        reason::ROLLBACK_FAILED,
        reason::CHART_NOT_LOADED,
        reason::VERSION_NOT_FOUND,
        reason::VERSION_INVALID,
        reason::HELM_UNAVAILABLE,
    ]
    .contains(&why)
}

/// Plans for a release that is as desired: its readiness, the Go operator's annotation, and leftovers.
fn settled(view: &View<'_>, newest: &Revision) -> Plan {
    let said = view.said();
    let wait = view.desired.handling.wait;
    let (settled, wake, next) = match (wait, view.unready) {
        (WaitPolicy::Ready, Some(detail)) => unready(view, newest, said.as_ref(), detail),
        (_, unready) => {
            let mut settled = ready(view, said.as_ref());
            settled.ready.message = waiting::told(&settled.ready.message, wait, unready);
            (settled, None, None)
        }
    };
    let wanted = krypton_types::fingerprint::original(
        &view.chart.repo,
        &view.chart.name,
        &view.chart.version,
    );
    let annotated = view.owner.tenant().is_none() || view.original_fingerprint() == Some(&wanted);
    let action = if !annotated {
        Action::Annotate
    } else if let Some(revision) = repair::unswept(view.revisions) {
        Action::Sweep(revision)
    } else {
        leaves_default(view, wait).unwrap_or(Action::Nothing)
    };
    // The state still has the message from before the action, so there is nothing to write.
    let quiet = settled.progress.as_ref().is_some_and(|progress| {
        progress.truth == Truth::True
            && [INSTALLING, UPGRADING].contains(&progress.message.as_str())
    });
    Plan {
        wake,
        next,
        applied_chart: (!quiet).then(|| view.chart.applied_name()),
        settled: true,
        ..Plan::new(action, settled)
    }
}

/// Returns the sweep of the Go operator's objects in `default`, once the release is complete and ready in its
/// workspace.
fn leaves_default(view: &View<'_>, wait: WaitPolicy) -> Option<Action> {
    let may = view.permit == Permit::Granted && view.paused().is_none();
    if !may || view.release_key.namespace == ORIGINALS_NAMESPACE {
        return None;
    }
    let revision = repair::overtaken(view.revisions)?;
    let ready = wait != WaitPolicy::Ready || view.unready.is_none();
    ready.then_some(Action::SweepDefault(revision))
}

fn ready(view: &View<'_>, said: Option<&ClusterState>) -> ClusterState {
    let said_progress = said.and_then(|said| said.progress.as_ref());
    let said_reason = |truth: Truth| {
        said_progress
            .filter(|progress| progress.truth == truth)
            .map(|found| found.reason.as_str())
    };
    let finished = match view.memory.applied.as_ref().map(|applied| applied.run) {
        Some(run) => Some(run),
        // An earlier process started this run.
        None => match said_reason(Truth::True) {
            Some(reason::INSTALLING) => Some(Run::Install),
            Some(reason::UPGRADING) => Some(Run::Upgrade),
            _ => None,
        },
    };
    let was_ready = said
        .map(|said| &said.ready)
        .filter(|ready| ready.truth == Truth::True);
    let (now_ready, progress) = match (finished, was_ready) {
        (Some(Run::Install), _) => (
            state(Truth::True, reason::INSTALLED, "release installed"),
            Some(state(Truth::False, reason::INSTALL_COMPLETE, "")),
        ),
        (Some(Run::Upgrade), _) => (
            state(Truth::True, reason::UPGRADED, "release upgraded"),
            Some(state(Truth::False, reason::UPGRADE_COMPLETE, "")),
        ),
        (None, Some(before)) => (before.clone(), said_progress.cloned()),
        (None, None) => (
            state(Truth::True, reason::NO_CHANGE, "release up-to-date"),
            None,
        ),
    };
    let progress = progress
        .or_else(|| Some(state(Truth::False, reason::NO_CHANGE, "")))
        .map(|progress| match progress.truth {
            Truth::False
                if progress.reason != reason::PAUSED && progress.reason != reason::LOCKED =>
            {
                progress
            }
            _ => state(Truth::False, reason::NO_CHANGE, ""),
        });
    ClusterState {
        ready: now_ready,
        progress,
        error: Some(no_error()),
    }
}

fn unready(
    view: &View<'_>,
    newest: &Revision,
    said: Option<&ClusterState>,
    detail: &str,
) -> (
    ClusterState,
    Option<krypton_runtime::clock::BootTime>,
    Option<Coming>,
) {
    let was_ready = said.is_some_and(|said| {
        said.ready.truth == Truth::True || said.ready.reason == reason::NOT_READY
    });
    let run = match view.memory.applied.as_ref() {
        Some(applied) => applied.run,
        None if newest.revision == 1 => Run::Install,
        None => Run::Upgrade,
    };
    // After a restart, the time starts again. A longer wait is the safe choice.
    let begun = view
        .memory
        .applied
        .as_ref()
        .map(|applied| applied.ended)
        .or(view.memory.known_since);
    let deadline =
        krypton_runtime::clock::BootTime(begun.unwrap_or(view.now).0 + view.policy.helm_timeout);
    let (going, failed_reason, verb) = match run {
        Run::Install => (reason::INSTALLING, reason::INSTALL_FAILED, "install"),
        Run::Upgrade => (reason::UPGRADING, reason::UPGRADE_FAILED, "upgrade"),
    };
    if was_ready {
        let message = detail.to_owned();
        let lost = ClusterState {
            ready: state(Truth::False, reason::NOT_READY, message),
            progress: said.and_then(|said| said.progress.clone()),
            error: Some(no_error()),
        };
        return (lost, None, None);
    }
    if view.now < deadline {
        let error = said.and_then(|said| said.error.clone());
        let error =
            error.filter(|error| error.truth == Truth::True && is_helm_or_chart(&error.reason));
        // Keep the first message for a while. Most releases become ready before a user reads another one, and each
        // message costs a status write.
        let told = krypton_runtime::clock::BootTime(begun.unwrap_or(view.now).0 + QUIET);
        let message = if view.now < told {
            match run {
                Run::Install => INSTALLING.to_owned(),
                Run::Upgrade => UPGRADING.to_owned(),
            }
        } else {
            format!("{verb} applied, waiting: {detail}")
        };
        // Report the next step only with the second message, because it would otherwise cause a separate write.
        let next = (view.now >= told).then_some(Coming {
            step: Step::Wait,
            at: Some(deadline),
            attempts: 0,
        });
        let deadline = if view.now < told {
            told.min(deadline)
        } else {
            deadline
        };
        let waiting = ClusterState {
            ready: state(Truth::False, going, message.clone()),
            progress: Some(state(Truth::True, going, message)),
            error: Some(error.unwrap_or_else(no_error)),
        };
        return (waiting, Some(deadline), next);
    }
    let message = format!(
        "not ready {} s after the {verb}: {detail}",
        view.policy.helm_timeout.as_secs()
    );
    (failed(failed_reason, &message, failed_reason), None, None)
}

pub(super) fn failed(why: &str, message: &str, progress: &str) -> ClusterState {
    ClusterState {
        ready: state(Truth::False, why, message),
        progress: Some(state(Truth::False, progress, "")),
        error: Some(state(Truth::True, why, message)),
    }
}

fn no_error() -> State {
    state(Truth::False, reason::NO_ERROR, "")
}
