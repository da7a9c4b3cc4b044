//! State of one profile: its plan, the access in use, and the next run of its program. Pure: the caller
//! runs due programs and reports the outcome.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use krypton_runtime::clock::BootTime;
use krypton_runtime::retry::backoff;
use krypton_types::conditions::reason;
use krypton_types::kubeconfig::Sanitized;

use super::super::Unresolved;
use super::access_plan::Plan;
use super::credential::Credential;
use super::profile::Profile;
use super::token_file::TokenFile;

/// Minimum interval between two runs for one profile.
pub(super) const APART: Duration = Duration::from_secs(10);
/// Longest pause after failures.
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Clients reread a token file once a minute. Until then, the cluster may reject the previous token.
const READ_AGAIN: Duration = Duration::from_secs(70);

/// Access that works or has worked.
#[derive(Clone, Debug)]
pub(super) struct Good {
    pub plan: Arc<Plan>,
    pub credential: Credential,
    pub access: Arc<Sanitized>,
    pub token_file: Option<Arc<TokenFile>>,
    pub life: Life,
}

/// Lifetime of a credential by the local clock. `None` means that it doesn't expire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Life {
    pub ends: Option<BootTime>,
    pub refresh: Option<BootTime>,
}

impl Life {
    /// Returns `None` if the credential has expired. The refresh is due after four fifths of the remaining
    /// lifetime, or up to a twentieth earlier. The jitter separates credentials that were issued together.
    pub(crate) fn of(
        expires: Option<Timestamp>,
        wall: Timestamp,
        now: BootTime,
        jitter: f64,
    ) -> Option<Self> {
        let Some(expires) = expires else {
            return Some(Self::default());
        };
        let rest = Duration::try_from(expires.duration_since(wall)).ok()?;
        let until = rest.mul_f64(0.8 - 0.05 * jitter.clamp(0.0, 1.0));
        (!rest.is_zero()).then(|| Self {
            ends: Some(BootTime(now.0.saturating_add(rest))),
            refresh: Some(BootTime(now.0.saturating_add(until))),
        })
    }
}

/// The next step for a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
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
    wanted: Result<Arc<Plan>, Unresolved>,
    running: bool,
    good: Option<Good>,
    /// The previous access. Its token file stays while a client may not have seen the access in `good`.
    before: Option<Good>,
    /// Why the last attempt at the wanted plan failed.
    failure: Option<String>,
    attempts: u32,
    last_run: Option<BootTime>,
    not_before: BootTime,
    /// Failed rebuilds, and the time of the next. They don't delay a run.
    rebuilds: u32,
    rebuild_at: BootTime,
    /// Whether the cluster has rejected the credential in use.
    doubted: bool,
    /// Runs after a rejection that returned the same credential.
    fruitless: u32,
    /// Until when a client may still use the previous credential.
    settling: BootTime,
    /// The last message while there was no access.
    said: Unresolved,
}

impl ProfileState {
    pub(super) fn new(profile: Profile, wanted: Result<Plan, Unresolved>) -> Self {
        let message = format!(
            "{} is new: its credential is being asked for",
            profile.origin
        );
        let said = Unresolved {
            reason: reason::STARTING,
            message,
        };
        Self {
            profile,
            said,
            wanted: wanted.map(Arc::new),
            running: false,
            good: None,
            before: None,
            failure: None,
            attempts: 0,
            last_run: None,
            not_before: BootTime::default(),
            rebuilds: 0,
            rebuild_at: BootTime::default(),
            doubted: false,
            fruitless: 0,
            settling: BootTime::default(),
        }
    }

    /// Takes a changed profile or provider file. An unchanged plan has no effect.
    pub(super) fn want(&mut self, wanted: Result<Plan, Unresolved>) {
        let same = match (&self.wanted, &wanted) {
            (Ok(before), Ok(after)) => **before == *after,
            (Err(before), Err(after)) => before == after,
            _ => false,
        };
        if !same {
            self.wanted = wanted.map(Arc::new);
            self.failure = None;
            (self.attempts, self.fruitless, self.rebuilds) = (0, 0, 0);
            (self.not_before, self.rebuild_at) = (BootTime::default(), BootTime::default());
        }
    }

    pub(super) fn plan(&self) -> Option<Arc<Plan>> {
        self.wanted.as_ref().ok().cloned()
    }

    pub(super) fn good(&self) -> Option<&Good> {
        self.good.as_ref()
    }

    /// Records that the cluster rejected a client's credential.
    pub(super) fn doubt(&mut self, now: BootTime) {
        self.doubted |= self.good.is_some() && now >= self.settling;
    }

    pub(super) fn due(&self, now: BootTime) -> Due {
        let Ok(plan) = &self.wanted else {
            return Due::Nothing;
        };
        if self.running {
            return Due::Nothing;
        }
        let (rebuild, run) = match &self.good {
            Some(good) if good.plan.command == plan.command => {
                let rebuild = (good.plan.cluster != plan.cluster).then_some(self.rebuild_at);
                let run = match self.doubted {
                    true => Some(now),
                    false => good.life.refresh,
                };
                (rebuild, run)
            }
            _ => (None, Some(now)),
        };
        if rebuild.is_some_and(|at| at <= now) {
            return Due::Rebuild;
        }
        let apart = self.last_run.map(|last| BootTime(last.0 + APART));
        let rested = self.not_before.max(apart.unwrap_or_default());
        let run = run.map(|at| at.max(rested));
        if run.is_some_and(|at| at <= now) {
            return Due::Run;
        }
        let next = rebuild.into_iter().chain(run).min();
        next.map_or(Due::Nothing, Due::At)
    }

    pub(super) fn started(&mut self, now: BootTime) {
        self.running = true;
        self.last_run = Some(now);
    }

    /// Records the end of a run for an outdated plan.
    pub(super) fn dropped(&mut self) {
        self.running = false;
    }

    /// Records the outcome of the run for the wanted plan.
    pub(super) fn ended(&mut self, outcome: Result<Good, String>, now: BootTime, jitter: f64) {
        self.running = false;
        match outcome {
            Ok(good) => self.take(good, now, jitter),
            Err(problem) => {
                self.attempts = self.attempts.saturating_add(1);
                let pause = backoff(self.attempts, RETRY_MAX, jitter).max(APART);
                self.not_before = BootTime(now.0 + pause);
                self.failure = Some(problem);
            }
        }
    }

    /// Records the outcome of a rebuild.
    pub(super) fn rebuilt(&mut self, outcome: Result<Good, String>, now: BootTime, jitter: f64) {
        match outcome {
            Ok(good) => self.put(good),
            Err(problem) => {
                self.rebuilds = self.rebuilds.saturating_add(1);
                self.rebuild_at = BootTime(now.0 + backoff(self.rebuilds, RETRY_MAX, jitter));
                self.failure = Some(problem);
            }
        }
    }

    fn take(&mut self, good: Good, now: BootTime, jitter: f64) {
        let before = self.good.as_ref().map(|before| &before.credential);
        if before == Some(&good.credential) {
            if self.doubted {
                self.fruitless = self.fruitless.saturating_add(1);
                let pause = backoff(self.fruitless, RETRY_MAX, jitter).max(APART);
                self.not_before = BootTime(now.0 + pause);
            }
        } else {
            self.fruitless = 0;
            if before.is_some() {
                self.settling = BootTime(now.0 + READ_AGAIN);
            }
        }
        self.put(good);
        self.attempts = 0;
        self.doubted = false;
    }

    fn put(&mut self, good: Good) {
        self.failure = None;
        self.rebuilds = 0;
        let replaced = self.good.replace(good);
        let now_in_use = self.good.as_ref().map(|good| &good.access.digest);
        if let Some(replaced) = replaced
            && Some(&replaced.access.digest) != now_in_use
        {
            self.before = Some(replaced);
        }
    }

    /// Ends all pauses.
    #[cfg(test)]
    pub(super) fn rested(&mut self) {
        (self.last_run, self.not_before) = (None, BootTime::default());
    }

    /// Returns the access to publish, and why it differs from the wanted one.
    pub(super) fn access(
        &mut self,
        now: BootTime,
    ) -> (Result<Arc<Sanitized>, Unresolved>, Option<Unresolved>) {
        let origin = &self.profile.origin;
        let why = match (&self.wanted, &self.failure) {
            (Err(why), _) => Some(why.clone()),
            (Ok(plan), Some(problem)) => Some(Unresolved {
                reason: reason::ACCESS_FAILED,
                message: format!(
                    "{origin}: access provider {}: {problem}",
                    plan.command.provider
                ),
            }),
            (Ok(_), None) => None,
        };
        let said = match (why, &self.good) {
            (None, Some(good)) => return (Ok(Arc::clone(&good.access)), None),
            // Keep the previous message until there is an outcome.
            (None, None) => self.said.clone(),
            (Some(why), Some(good))
                if why.reason == reason::ACCESS_FAILED
                    && !self.doubted
                    && good.life.ends.is_none_or(|ends| ends > now) =>
            {
                let stale = Unresolved {
                    reason: reason::CLUSTER_STALE,
                    message: format!(
                        "using the previous access, because new access failed: {}",
                        why.message
                    ),
                };
                return (Ok(Arc::clone(&good.access)), Some(stale));
            }
            (Some(why), _) => why,
        };
        self.said = said.clone();
        (Err(said), None)
    }

    /// Returns when the published access changes without an event, because the old access expires.
    pub(super) fn expiry(&self, now: BootTime) -> Option<BootTime> {
        let ends = self.good.as_ref()?.life.ends?;
        (ends > now && (self.failure.is_some() || self.wanted.is_err())).then_some(ends)
    }
}

#[cfg(test)]
mod tests {
    use krypton_types::kubeconfig;
    use serde_json::json;

    use super::super::access_plan::Command;
    use super::super::profile;
    use super::super::provider_file::ApiVersion;
    use super::*;

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

    fn good(plan: Plan, token: &str, life: Life) -> Good {
        let server = plan.cluster["server"].as_str().unwrap().to_owned();
        let document = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "a",
            "clusters": [{"name": "a", "cluster": {"server": "https://example.org"}}],
            "users": [{"name": "a", "user": {"token": token}}],
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        });
        let policy = kubeconfig::Policy::default();
        let mut access = kubeconfig::parse(document.to_string().as_bytes(), &policy).unwrap();
        access.digest = format!("{server} {:?}", plan.command.args);
        access.server = server;
        Good {
            credential: Credential {
                token: Some(token.to_owned()),
                certificate: None,
                expires: None,
            },
            access: Arc::new(access),
            plan: Arc::new(plan),
            token_file: None,
            life,
        }
    }

    fn at(seconds: u64) -> BootTime {
        BootTime(Duration::from_secs(seconds))
    }

    fn until(ends: u64, refresh: u64) -> Life {
        Life {
            ends: Some(at(ends)),
            refresh: Some(at(refresh)),
        }
    }

    fn held() -> ProfileState {
        let profile = Profile::read(&profile::object("edge-1", json!({}))).unwrap();
        ProfileState::new(profile, Ok(plan("x", "a")))
    }

    /// A profile that ran at 100 s, with this outcome.
    fn with(life: Life) -> ProfileState {
        let mut held = held();
        held.started(at(100));
        let first = plan("x", "a");
        held.ended(Ok(good(first, "t", life)), at(100), 0.5);
        held
    }

    fn failed(held: &mut ProfileState, seconds: u64) {
        held.started(at(seconds));
        held.ended(Err("it is broken".to_owned()), at(seconds), 1.0);
    }

    fn reasons(held: &mut ProfileState, seconds: u64) -> (&'static str, &'static str) {
        let (access, stale) = held.access(at(seconds));
        (
            access.map_or_else(|why| why.reason, |_| "ok"),
            stale.map_or("", |stale| stale.reason),
        )
    }

    #[test]
    fn new_profile_is_requested_immediately_and_once() {
        let mut held = held();
        assert_eq!(held.due(at(1)), Due::Run);
        assert_eq!(reasons(&mut held, 1), ("Starting", ""));
        held.started(at(1));
        assert_eq!(held.due(at(1000)), Due::Nothing);
    }

    #[test]
    fn unexpiring_credential_renews_only_on_change_or_doubt() {
        let mut held = with(Life::default());
        assert_eq!(held.due(at(1_000_000)), Due::Nothing);
        held.want(Ok(plan("x", "a")));
        assert_eq!(held.due(at(1_000_000)), Due::Nothing);
        held.want(Ok(plan("y", "a")));
        assert_eq!(held.due(at(1_000_000)), Due::Run);
        held.want(Ok(plan("x", "a")));
        held.doubt(at(105));
        assert_eq!(held.due(at(1_000_000)), Due::Run);
        assert_eq!(held.due(at(105)), Due::At(at(110)));
    }

    #[test]
    fn expiring_credential_is_renewed_before_expiry() {
        let held = with(until(200, 180));
        assert_eq!(held.due(at(120)), Due::At(at(180)));
        assert_eq!(held.due(at(180)), Due::Run);
        let second = |second| Timestamp::from_second(second).unwrap();
        let life = |jitter| Life::of(Some(second(1100)), second(100), at(5), jitter);
        assert_eq!(life(0.0), Some(until(1005, 805)));
        assert_eq!(life(1.0), Some(until(1005, 755)));
        assert_eq!(Life::of(Some(second(100)), second(100), at(5), 0.0), None);
        assert_eq!(Life::of(Some(second(99)), second(100), at(5), 0.0), None);
        assert_eq!(
            Life::of(None, second(100), at(5), 0.0),
            Some(Life::default())
        );
    }

    #[test]
    fn another_cluster_around_the_same_credential_runs_nothing() {
        let mut held = with(Life::default());
        held.want(Ok(plan("x", "b")));
        assert_eq!(held.due(at(100)), Due::Rebuild);
        held.rebuilt(Ok(good(plan("x", "b"), "t", Life::default())), at(100), 1.0);
        assert_eq!(held.due(at(1000)), Due::Nothing);
        assert_eq!(held.access(at(101)).0.unwrap().server, "b");
    }

    #[test]
    fn failed_rebuild_backs_off_and_delays_no_renewal() {
        let mut held = with(until(1000, 500));
        held.want(Ok(plan("x", "b")));
        let fail = |held: &mut ProfileState, second| {
            assert_eq!(held.due(at(second)), Due::Rebuild, "{second}");
            held.rebuilt(Err("no room left".to_owned()), at(second), 1.0);
        };
        fail(&mut held, 100);
        assert_eq!(reasons(&mut held, 100), ("ok", "RemoteClusterStale"));
        assert_eq!(held.due(at(100)), Due::At(at(105)));
        fail(&mut held, 105);
        assert_eq!(held.due(at(105)), Due::At(at(115)));
        for second in [115, 135, 175, 235, 295, 355, 415, 475] {
            fail(&mut held, second);
        }
        // The credential is renewed on schedule and used with the wanted cluster.
        assert_eq!(held.due(at(475)), Due::At(at(500)));
        assert_eq!(held.due(at(500)), Due::Run);
        failed(&mut held, 500);
        assert_eq!(held.due(at(500)), Due::At(at(510)));
        fail(&mut held, 535);
        assert_eq!(held.due(at(535)), Due::Run);
        // A user's change is tried immediately and resets the pauses.
        held.want(Ok(plan("x", "c")));
        fail(&mut held, 536);
        assert_eq!(held.rebuild_at, at(541));
        let built = good(plan("x", "c"), "t", until(1000, 900));
        held.rebuilt(Ok(built), at(541), 1.0);
        assert_eq!(reasons(&mut held, 541), ("ok", ""));
        assert_eq!(held.due(at(600)), Due::At(at(900)));
    }

    #[test]
    fn provider_failure_is_reported_and_backs_off() {
        let mut held = held();
        failed(&mut held, 100);
        let (access, _) = held.access(at(100));
        let why = access.unwrap_err();
        assert_eq!(why.reason, "AccessProviderFailed");
        assert!(
            why.message.contains("ClusterProfile fleet/edge-1"),
            "{why:?}"
        );
        assert!(why.message.contains("it is broken"), "{why:?}");
        assert_eq!(held.due(at(100)), Due::At(at(110)));
        for _ in 0..9 {
            failed(&mut held, 200);
        }
        assert_eq!(held.due(at(200)), Due::At(at(260)));
        // A user's change is tried immediately.
        held.want(Ok(plan("y", "a")));
        assert_eq!(held.due(at(210)), Due::Run);
    }

    #[test]
    fn old_access_stays_stale_until_it_expires() {
        let mut held = with(until(200, 180));
        assert_eq!(reasons(&mut held, 150), ("ok", ""));
        failed(&mut held, 180);
        assert_eq!(reasons(&mut held, 181), ("ok", "RemoteClusterStale"));
        assert_eq!(held.expiry(at(181)), Some(at(200)));
        assert_eq!(reasons(&mut held, 200), ("AccessProviderFailed", ""));
        assert_eq!(held.expiry(at(200)), None);
        held.started(at(210));
        held.ended(Ok(good(plan("x", "a"), "u", until(400, 380))), at(210), 0.0);
        assert_eq!(reasons(&mut held, 210), ("ok", ""));
    }

    #[test]
    fn changed_profile_is_stale_until_new_access_arrives() {
        let mut held = with(Life::default());
        held.want(Ok(plan("y", "b")));
        assert_eq!(reasons(&mut held, 110), ("ok", ""));
        failed(&mut held, 110);
        assert_eq!(held.access(at(110)).0.unwrap().server, "a");
        assert_eq!(reasons(&mut held, 110), ("ok", "RemoteClusterStale"));
        held.started(at(120));
        held.ended(Ok(good(plan("y", "b"), "t", Life::default())), at(120), 0.0);
        assert_eq!(held.access(at(120)).0.unwrap().server, "b");
        assert_eq!(reasons(&mut held, 120), ("ok", ""));
    }

    #[test]
    fn stale_access_survives_provider_removal_not_unready_profile() {
        let refuse = |reason| {
            Err(Unresolved {
                reason,
                message: "m".to_owned(),
            })
        };
        let mut held = with(Life::default());
        held.want(refuse(reason::ACCESS_FAILED));
        assert_eq!(reasons(&mut held, 110), ("ok", "RemoteClusterStale"));
        held.want(refuse(reason::PROFILE_NOT_READY));
        assert_eq!(reasons(&mut held, 110), ("ClusterProfileNotReady", ""));
        assert_eq!(held.due(at(110)), Due::Nothing);
        held.want(Ok(plan("x", "a")));
        assert_eq!(reasons(&mut held, 110), ("ok", ""));
        assert_eq!(held.due(at(110)), Due::Nothing);
    }

    #[test]
    fn profile_stays_unready_until_first_credential() {
        let mut held = held();
        held.want(Err(Unresolved {
            reason: reason::PROFILE_NOT_READY,
            message: String::new(),
        }));
        assert_eq!(reasons(&mut held, 1).0, "ClusterProfileNotReady");
        held.want(Ok(plan("x", "a")));
        held.started(at(2));
        assert_eq!(reasons(&mut held, 2).0, "ClusterProfileNotReady");
    }

    #[test]
    fn refused_credentials_are_renewed_with_backoff() {
        let mut held = with(Life::default());
        let renewed = |held: &mut ProfileState, token: &str, seconds| {
            held.doubt(at(seconds));
            held.started(at(seconds));
            let good = good(plan("x", "a"), token, Life::default());
            held.ended(Ok(good), at(seconds), 1.0);
            held.doubt(at(seconds));
        };
        // Runs that return the same credential back off.
        renewed(&mut held, "t", 110);
        assert_eq!(held.due(at(110)), Due::At(at(120)));
        renewed(&mut held, "t", 120);
        renewed(&mut held, "t", 130);
        assert_eq!(held.due(at(130)), Due::At(at(150)));
        // After a new credential, the cluster rejects clients with the previous one until they have reread
        // it.
        renewed(&mut held, "u", 150);
        held.doubt(at(219));
        assert_eq!(held.due(at(219)), Due::Nothing);
        held.want(Err(Unresolved {
            reason: reason::ACCESS_FAILED,
            message: String::new(),
        }));
        assert_eq!(reasons(&mut held, 219), ("ok", "RemoteClusterStale"));
        held.want(Ok(plan("x", "a")));
        held.doubt(at(220));
        assert_eq!(held.due(at(220)), Due::Run);
        failed(&mut held, 220);
        assert_eq!(reasons(&mut held, 220), ("AccessProviderFailed", ""));
    }

    #[test]
    fn run_started_before_change_is_dropped() {
        let mut held = held();
        held.started(at(1));
        held.want(Ok(plan("y", "a")));
        held.dropped();
        assert_eq!(reasons(&mut held, 2).0, "Starting");
        assert_eq!(held.due(at(2)), Due::At(at(11)));
    }
}
