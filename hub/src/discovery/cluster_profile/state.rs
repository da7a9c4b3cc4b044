//! State of one profile: its plan, the access in use, and the next run of its program. Pure: the caller
//! runs due programs and reports the outcome.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use krypton_runtime::clock::BootTime;
use krypton_runtime::retry::backoff;
use krypton_types::conditions::reason;
use krypton_types::kubeconfig::SanitizedKubeconfig;

use super::super::Unresolved;
use super::access_plan::Plan;
use super::credential::Credential;
use super::profile::Profile;
use super::token_file::TokenFile;

/// Minimum interval between two runs for one profile.
pub(super) const MIN_INTERVAL: Duration = Duration::from_secs(10);
/// Longest pause after failures.
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Clients reread a token file once a minute. Until then, the cluster may reject the previous token.
const TOKEN_REREAD: Duration = Duration::from_secs(70);

/// Access that works or has worked.
#[derive(Clone, Debug)]
pub(super) struct WorkingAccess {
    pub plan: Arc<Plan>,
    pub credential: Credential,
    pub access: Arc<SanitizedKubeconfig>,
    pub token_file: Option<Arc<TokenFile>>,
    pub lifetime: CredentialLifetime,
}

/// Lifetime of a credential by the local clock. `None` means that it doesn't expire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CredentialLifetime {
    pub expires_at: Option<BootTime>,
    pub refresh_at: Option<BootTime>,
}

impl CredentialLifetime {
    /// Returns `None` if the credential has expired. The refresh is due after four fifths of the remaining
    /// lifetime, or up to a twentieth earlier. The jitter separates credentials that were issued together.
    pub(crate) fn from_expiry(
        expires: Option<Timestamp>,
        wall: Timestamp,
        now: BootTime,
        jitter: f64,
    ) -> Option<Self> {
        let Some(expires) = expires else {
            return Some(Self::default());
        };
        let rest = Duration::try_from(expires.duration_since(wall)).ok()?;
        let until_refresh = rest.mul_f64(0.8 - 0.05 * jitter.clamp(0.0, 1.0));
        (!rest.is_zero()).then(|| Self {
            expires_at: Some(BootTime(now.0.saturating_add(rest))),
            refresh_at: Some(BootTime(now.0.saturating_add(until_refresh))),
        })
    }
}

/// The next step for a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DueWork {
    Nothing,
    /// Check again at this time, unless an event comes first.
    At(BootTime),
    /// Run the program.
    Run,
    /// The credential is valid; only the cluster has changed.
    Rebuild,
}

/// State of one profile.
#[derive(Debug)]
pub(super) struct ProfileState {
    pub profile: Profile,
    desired_plan: Result<Arc<Plan>, Unresolved>,
    running: bool,
    working: Option<WorkingAccess>,
    /// The previous access. Its token file stays while a client may not have seen the access in `working`.
    previous: Option<WorkingAccess>,
    /// Why the last attempt at the desired plan failed.
    failure: Option<String>,
    failed_runs: u32,
    last_run: Option<BootTime>,
    not_before: BootTime,
    /// Failed rebuilds, and the time of the next. They don't delay a run.
    failed_rebuilds: u32,
    rebuild_at: BootTime,
    /// Whether the cluster has rejected the credential in use.
    rejected: bool,
    /// Runs after a rejection that returned the same credential.
    unchanged_runs: u32,
    /// Until when a client may still use the previous credential.
    grace_until: BootTime,
    /// The last message while there was no access.
    last_problem: Unresolved,
}

impl ProfileState {
    pub(super) fn new(profile: Profile, desired_plan: Result<Plan, Unresolved>) -> Self {
        let message = format!(
            "{} is new: its credential is being requested",
            profile.source.origin
        );
        Self {
            profile,
            last_problem: Unresolved::new(reason::STARTING, message),
            desired_plan: desired_plan.map(Arc::new),
            running: false,
            working: None,
            previous: None,
            failure: None,
            failed_runs: 0,
            last_run: None,
            not_before: BootTime::default(),
            failed_rebuilds: 0,
            rebuild_at: BootTime::default(),
            rejected: false,
            unchanged_runs: 0,
            grace_until: BootTime::default(),
        }
    }

    /// Takes a changed profile or provider file. An unchanged plan has no effect.
    pub(super) fn set_plan(&mut self, desired_plan: Result<Plan, Unresolved>) {
        let desired_plan = desired_plan.map(Arc::new);
        if self.desired_plan != desired_plan {
            self.desired_plan = desired_plan;
            self.failure = None;
            (self.failed_runs, self.unchanged_runs, self.failed_rebuilds) = (0, 0, 0);
            (self.not_before, self.rebuild_at) = (BootTime::default(), BootTime::default());
        }
    }

    pub(super) fn plan(&self) -> Option<Arc<Plan>> {
        self.desired_plan.as_ref().ok().cloned()
    }

    pub(super) fn working_access(&self) -> Option<&WorkingAccess> {
        self.working.as_ref()
    }

    /// Records that the cluster rejected a client's credential.
    pub(super) fn credential_rejected(&mut self, now: BootTime) {
        self.rejected |= self.working.is_some() && now >= self.grace_until;
    }

    pub(super) fn due(&self, now: BootTime) -> DueWork {
        let Ok(plan) = &self.desired_plan else {
            return DueWork::Nothing;
        };
        if self.running {
            return DueWork::Nothing;
        }
        let (rebuild_due, run_due) = match &self.working {
            Some(working) if working.plan.command == plan.command => {
                let rebuild_due = (working.plan.cluster != plan.cluster).then_some(self.rebuild_at);
                let run_due = match self.rejected {
                    true => Some(now),
                    false => working.lifetime.refresh_at,
                };
                (rebuild_due, run_due)
            }
            _ => (None, Some(now)),
        };
        if rebuild_due.is_some_and(|at| at <= now) {
            return DueWork::Rebuild;
        }
        let interval_end = self.last_run.map(|last| last + MIN_INTERVAL);
        let allowed = self.not_before.max(interval_end.unwrap_or_default());
        let run_due = run_due.map(|at| at.max(allowed));
        if run_due.is_some_and(|at| at <= now) {
            return DueWork::Run;
        }
        let next = rebuild_due.into_iter().chain(run_due).min();
        next.map_or(DueWork::Nothing, DueWork::At)
    }

    pub(super) fn run_started(&mut self, now: BootTime) {
        self.running = true;
        self.last_run = Some(now);
    }

    /// Records the end of a run for an outdated plan.
    pub(super) fn run_discarded(&mut self) {
        self.running = false;
    }

    /// Records the outcome of the run for the desired plan.
    pub(super) fn run_finished(
        &mut self,
        outcome: Result<WorkingAccess, String>,
        now: BootTime,
        jitter: f64,
    ) {
        self.running = false;
        match outcome {
            Ok(working) => self.accept(working, now, jitter),
            Err(problem) => {
                self.failed_runs = self.failed_runs.saturating_add(1);
                let pause = backoff(self.failed_runs, RETRY_MAX, jitter).max(MIN_INTERVAL);
                self.not_before = now + pause;
                self.failure = Some(problem);
            }
        }
    }

    /// Records the outcome of a rebuild.
    pub(super) fn rebuild_finished(
        &mut self,
        outcome: Result<WorkingAccess, String>,
        now: BootTime,
        jitter: f64,
    ) {
        match outcome {
            Ok(working) => self.replace_access(working),
            Err(problem) => {
                self.failed_rebuilds = self.failed_rebuilds.saturating_add(1);
                self.rebuild_at = now + backoff(self.failed_rebuilds, RETRY_MAX, jitter);
                self.failure = Some(problem);
            }
        }
    }

    fn accept(&mut self, working: WorkingAccess, now: BootTime, jitter: f64) {
        let previous = self.working.as_ref().map(|previous| &previous.credential);
        if previous == Some(&working.credential) {
            if self.rejected {
                self.unchanged_runs = self.unchanged_runs.saturating_add(1);
                let pause = backoff(self.unchanged_runs, RETRY_MAX, jitter).max(MIN_INTERVAL);
                self.not_before = now + pause;
            }
        } else {
            self.unchanged_runs = 0;
            if previous.is_some() {
                self.grace_until = now + TOKEN_REREAD;
            }
        }
        self.replace_access(working);
        self.failed_runs = 0;
        self.rejected = false;
    }

    fn replace_access(&mut self, working: WorkingAccess) {
        self.failure = None;
        self.failed_rebuilds = 0;
        let replaced = self.working.replace(working);
        let digest_in_use = self.working.as_ref().map(|working| &working.access.digest);
        if let Some(replaced) = replaced
            && Some(&replaced.access.digest) != digest_in_use
        {
            self.previous = Some(replaced);
        }
    }

    /// Ends all pauses.
    #[cfg(test)]
    pub(super) fn end_pauses(&mut self) {
        (self.last_run, self.not_before) = (None, BootTime::default());
    }

    /// Returns the access to publish, and why it differs from the desired one.
    pub(super) fn access(
        &mut self,
        now: BootTime,
    ) -> (
        Result<Arc<SanitizedKubeconfig>, Unresolved>,
        Option<Unresolved>,
    ) {
        let origin = &self.profile.source.origin;
        let problem = match (&self.desired_plan, &self.failure) {
            (Err(problem), _) => Some(problem.clone()),
            (Ok(plan), Some(problem)) => {
                let provider = &plan.command.provider;
                let message = format!("{origin}: access provider {provider}: {problem}");
                Some(Unresolved::new(reason::ACCESS_FAILED, message))
            }
            (Ok(_), None) => None,
        };
        let problem = match (problem, &self.working) {
            (None, Some(working)) => return (Ok(Arc::clone(&working.access)), None),
            // Keep the previous message until there is an outcome.
            (None, None) => self.last_problem.clone(),
            (Some(problem), Some(working))
                if keeps_previous_access(problem.reason)
                    && !self.rejected
                    && working
                        .lifetime
                        .expires_at
                        .is_none_or(|expires_at| expires_at > now) =>
            {
                let message = format!(
                    "using the previous access, because new access failed: {}",
                    problem.message
                );
                let stale = Unresolved::new(reason::CLUSTER_STALE, message);
                return (Ok(Arc::clone(&working.access)), Some(stale));
            }
            (Some(problem), _) => problem,
        };
        self.last_problem = problem.clone();
        (Err(problem), None)
    }

    /// Returns when the published access changes without an event, because the old access expires.
    pub(super) fn next_expiry(&self, now: BootTime) -> Option<BootTime> {
        let expires_at = self.working.as_ref()?.lifetime.expires_at?;
        (expires_at > now && (self.failure.is_some() || self.desired_plan.is_err()))
            .then_some(expires_at)
    }
}

/// Returns whether earlier access stays in use. The profile stays ready with these problems, and only the hub's
/// side is at fault.
fn keeps_previous_access(problem: &str) -> bool {
    matches!(
        problem,
        reason::ACCESS_FAILED | reason::MULTICLUSTER_DISABLED
    )
}

#[cfg(test)]
mod tests {
    use krypton_types::kubeconfig;
    use serde_json::json;

    use super::super::access_plan::Command;
    use super::super::profile;
    use super::super::provider_file::ApiVersion;
    use super::*;
    use crate::discovery::object_and_secret::tests::kubeconfig;

    fn plan(arg: &str, server: &str) -> Plan {
        Plan {
            command: Command {
                provider: "a".to_owned(),
                program: "/a".to_owned(),
                args: vec![arg.to_owned()],
                env: Default::default(),
                api_version: ApiVersion::V1,
                info: String::new(),
            },
            cluster: [("server".to_owned(), json!(server))].into_iter().collect(),
        }
    }

    fn access(plan: Plan, token: &str, lifetime: CredentialLifetime) -> WorkingAccess {
        let server = plan.cluster["server"].as_str().unwrap().to_owned();
        let document = kubeconfig("https://example.org");
        let policy = kubeconfig::Policy::default();
        let mut access = kubeconfig::parse(document.as_bytes(), &policy).unwrap();
        access.digest = format!("{server} {:?}", plan.command.args);
        access.server = server;
        WorkingAccess {
            credential: Credential {
                token: Some(token.to_owned()),
                certificate: None,
                expires: None,
            },
            access: Arc::new(access),
            plan: Arc::new(plan),
            token_file: None,
            lifetime,
        }
    }

    fn at(seconds: u64) -> BootTime {
        BootTime(Duration::from_secs(seconds))
    }

    fn lifetime_of(expires_at: u64, refresh_at: u64) -> CredentialLifetime {
        CredentialLifetime {
            expires_at: Some(at(expires_at)),
            refresh_at: Some(at(refresh_at)),
        }
    }

    fn new_state() -> ProfileState {
        let profile = Profile::read(&profile::object("edge-1", json!({}))).unwrap();
        ProfileState::new(profile, Ok(plan("x", "a")))
    }

    /// A profile that ran at 100 s, with this outcome.
    fn state_after_run(lifetime: CredentialLifetime) -> ProfileState {
        let mut state = new_state();
        finish_run(&mut state, access(plan("x", "a"), "t", lifetime), 100);
        state
    }

    fn finish_run(state: &mut ProfileState, access: WorkingAccess, seconds: u64) {
        state.run_started(at(seconds));
        state.run_finished(Ok(access), at(seconds), 1.0);
    }

    fn unresolved(reason: &'static str) -> Result<Plan, Unresolved> {
        Err(Unresolved::new(reason, String::new()))
    }

    fn fail_run(state: &mut ProfileState, seconds: u64) {
        state.run_started(at(seconds));
        state.run_finished(Err("it is broken".to_owned()), at(seconds), 1.0);
    }

    fn reasons(state: &mut ProfileState, seconds: u64) -> (&'static str, &'static str) {
        let (access, stale) = state.access(at(seconds));
        (
            access.map_or_else(|problem| problem.reason, |_| "ok"),
            stale.map_or("", |stale| stale.reason),
        )
    }

    #[test]
    fn new_profile_is_requested_immediately_and_once() {
        let mut state = new_state();
        assert_eq!(state.due(at(1)), DueWork::Run);
        assert_eq!(reasons(&mut state, 1), ("Starting", ""));
        state.run_started(at(1));
        assert_eq!(state.due(at(1000)), DueWork::Nothing);
    }

    #[test]
    fn unexpiring_credential_renews_only_on_change_or_doubt() {
        let mut state = state_after_run(CredentialLifetime::default());
        assert_eq!(state.due(at(1_000_000)), DueWork::Nothing);
        state.set_plan(Ok(plan("x", "a")));
        assert_eq!(state.due(at(1_000_000)), DueWork::Nothing);
        state.set_plan(Ok(plan("y", "a")));
        assert_eq!(state.due(at(1_000_000)), DueWork::Run);
        state.set_plan(Ok(plan("x", "a")));
        state.credential_rejected(at(105));
        assert_eq!(state.due(at(1_000_000)), DueWork::Run);
        assert_eq!(state.due(at(105)), DueWork::At(at(110)));
    }

    #[test]
    fn expiring_credential_is_renewed_before_expiry() {
        let state = state_after_run(lifetime_of(200, 180));
        assert_eq!(state.due(at(120)), DueWork::At(at(180)));
        assert_eq!(state.due(at(180)), DueWork::Run);
        let second = |second| Timestamp::from_second(second).unwrap();
        for (expires, jitter, lifetime) in [
            (Some(1100), 0.0, Some(lifetime_of(1005, 805))),
            (Some(1100), 1.0, Some(lifetime_of(1005, 755))),
            (Some(100), 0.0, None),
            (Some(99), 0.0, None),
            (None, 0.0, Some(CredentialLifetime::default())),
        ] {
            let expires = expires.map(second);
            let actual = CredentialLifetime::from_expiry(expires, second(100), at(5), jitter);
            assert_eq!(actual, lifetime, "{expires:?}");
        }
    }

    #[test]
    fn another_cluster_around_the_same_credential_runs_nothing() {
        let mut state = state_after_run(CredentialLifetime::default());
        state.set_plan(Ok(plan("x", "b")));
        assert_eq!(state.due(at(100)), DueWork::Rebuild);
        state.rebuild_finished(
            Ok(access(plan("x", "b"), "t", CredentialLifetime::default())),
            at(100),
            1.0,
        );
        assert_eq!(state.due(at(1000)), DueWork::Nothing);
        assert_eq!(state.access(at(101)).0.unwrap().server, "b");
    }

    #[test]
    fn failed_rebuild_backs_off_and_delays_no_renewal() {
        let mut state = state_after_run(lifetime_of(1000, 500));
        state.set_plan(Ok(plan("x", "b")));
        let fail = |state: &mut ProfileState, second| {
            assert_eq!(state.due(at(second)), DueWork::Rebuild, "{second}");
            state.rebuild_finished(Err("no room left".to_owned()), at(second), 1.0);
        };
        fail(&mut state, 100);
        assert_eq!(reasons(&mut state, 100), ("ok", "RemoteClusterStale"));
        assert_eq!(state.due(at(100)), DueWork::At(at(105)));
        fail(&mut state, 105);
        assert_eq!(state.due(at(105)), DueWork::At(at(115)));
        for second in [115, 135, 175, 235, 295, 355, 415, 475] {
            fail(&mut state, second);
        }
        // The credential is renewed on schedule and used with the wanted cluster.
        assert_eq!(state.due(at(475)), DueWork::At(at(500)));
        assert_eq!(state.due(at(500)), DueWork::Run);
        fail_run(&mut state, 500);
        assert_eq!(state.due(at(500)), DueWork::At(at(510)));
        fail(&mut state, 535);
        assert_eq!(state.due(at(535)), DueWork::Run);
        // A user's change is tried immediately and resets the pauses.
        state.set_plan(Ok(plan("x", "c")));
        fail(&mut state, 536);
        assert_eq!(state.rebuild_at, at(541));
        let built = access(plan("x", "c"), "t", lifetime_of(1000, 900));
        state.rebuild_finished(Ok(built), at(541), 1.0);
        assert_eq!(reasons(&mut state, 541), ("ok", ""));
        assert_eq!(state.due(at(600)), DueWork::At(at(900)));
    }

    #[test]
    fn provider_failure_is_reported_and_backs_off() {
        let mut state = new_state();
        fail_run(&mut state, 100);
        let (access, _) = state.access(at(100));
        let problem = access.unwrap_err();
        assert_eq!(problem.reason, "AccessProviderFailed");
        assert!(
            problem.message.contains("ClusterProfile fleet/edge-1"),
            "{problem:?}"
        );
        assert!(problem.message.contains("it is broken"), "{problem:?}");
        assert_eq!(state.due(at(100)), DueWork::At(at(110)));
        for _ in 0..9 {
            fail_run(&mut state, 200);
        }
        assert_eq!(state.due(at(200)), DueWork::At(at(260)));
        // A user's change is tried immediately.
        state.set_plan(Ok(plan("y", "a")));
        assert_eq!(state.due(at(210)), DueWork::Run);
    }

    #[test]
    fn old_access_stays_stale_until_it_expires() {
        let mut state = state_after_run(lifetime_of(200, 180));
        assert_eq!(reasons(&mut state, 150), ("ok", ""));
        fail_run(&mut state, 180);
        assert_eq!(reasons(&mut state, 181), ("ok", "RemoteClusterStale"));
        assert_eq!(state.next_expiry(at(181)), Some(at(200)));
        assert_eq!(reasons(&mut state, 200), ("AccessProviderFailed", ""));
        assert_eq!(state.next_expiry(at(200)), None);
        let renewed = access(plan("x", "a"), "u", lifetime_of(400, 380));
        finish_run(&mut state, renewed, 210);
        assert_eq!(reasons(&mut state, 210), ("ok", ""));
    }

    #[test]
    fn changed_profile_is_stale_until_new_access_arrives() {
        let mut state = state_after_run(CredentialLifetime::default());
        state.set_plan(Ok(plan("y", "b")));
        assert_eq!(reasons(&mut state, 110), ("ok", ""));
        fail_run(&mut state, 110);
        assert_eq!(state.access(at(110)).0.unwrap().server, "a");
        assert_eq!(reasons(&mut state, 110), ("ok", "RemoteClusterStale"));
        let changed = access(plan("y", "b"), "t", CredentialLifetime::default());
        finish_run(&mut state, changed, 120);
        assert_eq!(state.access(at(120)).0.unwrap().server, "b");
        assert_eq!(reasons(&mut state, 120), ("ok", ""));
    }

    #[test]
    fn stale_access_survives_provider_removal_not_unready_profile() {
        let mut state = state_after_run(CredentialLifetime::default());
        for problem in [reason::ACCESS_FAILED, reason::MULTICLUSTER_DISABLED] {
            state.set_plan(unresolved(problem));
            assert_eq!(reasons(&mut state, 110), ("ok", "RemoteClusterStale"));
        }
        state.set_plan(unresolved(reason::PROFILE_NOT_READY));
        assert_eq!(reasons(&mut state, 110), ("ClusterProfileNotReady", ""));
        assert_eq!(state.due(at(110)), DueWork::Nothing);
        state.set_plan(Ok(plan("x", "a")));
        assert_eq!(reasons(&mut state, 110), ("ok", ""));
        assert_eq!(state.due(at(110)), DueWork::Nothing);
    }

    #[test]
    fn profile_stays_unready_until_first_credential() {
        let mut state = new_state();
        state.set_plan(unresolved(reason::PROFILE_NOT_READY));
        assert_eq!(reasons(&mut state, 1).0, "ClusterProfileNotReady");
        state.set_plan(Ok(plan("x", "a")));
        state.run_started(at(2));
        assert_eq!(reasons(&mut state, 2).0, "ClusterProfileNotReady");
    }

    #[test]
    fn refused_credentials_are_renewed_with_backoff() {
        let mut state = state_after_run(CredentialLifetime::default());
        let renew = |state: &mut ProfileState, token: &str, seconds| {
            state.credential_rejected(at(seconds));
            let access = access(plan("x", "a"), token, CredentialLifetime::default());
            finish_run(state, access, seconds);
            state.credential_rejected(at(seconds));
        };
        // Runs that return the same credential back off.
        renew(&mut state, "t", 110);
        assert_eq!(state.due(at(110)), DueWork::At(at(120)));
        renew(&mut state, "t", 120);
        renew(&mut state, "t", 130);
        assert_eq!(state.due(at(130)), DueWork::At(at(150)));
        // After a new credential, the cluster rejects clients with the previous one until they have reread
        // it.
        renew(&mut state, "u", 150);
        state.credential_rejected(at(219));
        assert_eq!(state.due(at(219)), DueWork::Nothing);
        state.set_plan(unresolved(reason::ACCESS_FAILED));
        assert_eq!(reasons(&mut state, 219), ("ok", "RemoteClusterStale"));
        state.set_plan(Ok(plan("x", "a")));
        state.credential_rejected(at(220));
        assert_eq!(state.due(at(220)), DueWork::Run);
        fail_run(&mut state, 220);
        assert_eq!(reasons(&mut state, 220), ("AccessProviderFailed", ""));
    }

    #[test]
    fn run_started_before_change_is_dropped() {
        let mut state = new_state();
        state.run_started(at(1));
        state.set_plan(Ok(plan("y", "a")));
        state.run_discarded();
        assert_eq!(reasons(&mut state, 2).0, "Starting");
        assert_eq!(state.due(at(2)), DueWork::At(at(11)));
    }
}
