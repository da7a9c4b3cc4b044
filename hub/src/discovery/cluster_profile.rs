//! ClusterProfiles of the Cluster Inventory API, in one namespace or in all. A program in the hub's image,
//! named in the provider file, issues the credential of each profile. The hub keeps a credential until it
//! expires.

mod access_plan;
pub(crate) mod credential;
mod plugin;
mod profile;
pub mod provider_file;
mod state;
mod token_file;

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt as _, StreamExt as _};
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::{Newest as _, NewestSeen as _};
use krypton_runtime::watch::WatchBackoff;
use krypton_runtime::watchdog::Watchdog;
use krypton_types::error_chain::chain;
use krypton_types::kubeconfig::{self, Policy};
use kube::Client;
use kube::api::{Api, DynamicObject};
use kube::runtime::watcher::{self, Config, Event};
use serde_json::{Map, Value};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

use super::listed::{self, Key, Listed, OBJECTS_MAX};
use super::{Finds, Kind, Origin, Provider, Source};
use access_plan::Plan;
use credential::Credential;
use plugin::{Limits, Plugins};
use profile::Profile;
use provider_file::ProviderFile;
use state::{Due, Good, Held, Life};
use token_file::TokenFile;

/// Access to the clusters of all profiles, shared by the providers of several namespaces.
#[derive(Debug)]
pub struct Access {
    /// `None` if the hub was started without a file.
    file: watch::Receiver<Option<Arc<ProviderFile>>>,
    plugins: Plugins,
    /// Private directory for tokens and for the working directories of running programs.
    folder: PathBuf,
    policy: Policy,
}

impl Access {
    /// Follows the file, whose first content is `first`. Must be called inside a tokio runtime.
    pub fn start(
        watchdog: &Watchdog,
        path: Option<&Path>,
        first: Option<ProviderFile>,
        scratch: &Path,
        policy: Policy,
    ) -> io::Result<Arc<Self>> {
        let (tx, file) = watch::channel(first.map(Arc::new));
        if let Some(path) = path {
            let every = provider_file::POLL_INTERVAL;
            let following = provider_file::watch(path.to_owned(), every, tx);
            tokio::spawn(watchdog.watch("the file of access providers", following));
        }
        Self::new(file, scratch, policy, Limits::default())
    }

    fn new(
        file: watch::Receiver<Option<Arc<ProviderFile>>>,
        scratch: &Path,
        policy: Policy,
        limits: Limits,
    ) -> io::Result<Arc<Self>> {
        // Clients and Helm run in other working directories.
        let folder = std::path::absolute(scratch)?.join("cluster-profiles");
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)?;
        Ok(Arc::new(Self {
            file,
            plugins: Plugins::new(folder.clone(), limits),
            folder,
            policy,
        }))
    }

    /// Runs the program of a plan and returns the credential without using it.
    async fn ask(&self, plan: &Plan) -> Result<Credential, String> {
        let ran = self.plugins.run(&plan.command).await;
        let answer = ran.map_err(|error| chain(&error))?;
        credential::read(&answer, plan.command.api_version)
            .map_err(|error| format!("{}: {}", plan.command.program, chain(&error)))
    }

    /// Builds the access for clients from a credential. If the previous access has the same plan, its token
    /// file gets the new token, so the kubeconfig stays the same.
    fn put_to_use(
        &self,
        plan: &Arc<Plan>,
        credential: Credential,
        life: Life,
        before: Option<&Good>,
    ) -> Result<Good, String> {
        let keeping = |error: io::Error| format!("keeping its token failed: {error}");
        let before = before
            .filter(|before| before.plan == *plan)
            .and_then(|before| before.token_file.clone());
        let token_file = match (&credential.token, before) {
            (None, _) => None,
            (Some(token), Some(file)) => {
                file.replace(token).map_err(keeping)?;
                Some(file)
            }
            (Some(token), None) => {
                // A token file belongs to one plan: a client for a different server must never read its
                // token.
                let file = TokenFile::write(&self.folder, token).map_err(keeping)?;
                Some(Arc::new(file))
            }
        };
        // The cluster has passed the sanitizer with the hub's policy. The hub itself creates the user.
        let policy = Policy {
            allow_token_file: true,
            ..self.policy
        };
        let user = user(&credential, token_file.as_deref().map(TokenFile::path));
        let document = access_plan::document(&plan.cluster, &Value::Object(user));
        let access = kubeconfig::parse(document.as_bytes(), &policy).map_err(|error| {
            format!(
                "its credential cannot be used: {}",
                chain(&error).replace("users[0].", "")
            )
        })?;
        Ok(Good {
            plan: Arc::clone(plan),
            credential,
            access: Arc::new(access),
            token_file,
            life,
        })
    }
}

fn user(credential: &Credential, token_file: Option<&Path>) -> Map<String, Value> {
    let mut user = Map::new();
    if let Some(path) = token_file {
        user.insert("tokenFile".to_owned(), path.to_string_lossy().into());
    }
    if let Some((certificate, key)) = &credential.certificate {
        let certificate = STANDARD.encode(certificate);
        user.insert("client-certificate-data".to_owned(), certificate.into());
        user.insert("client-key-data".to_owned(), STANDARD.encode(key).into());
    }
    user
}

/// Provider of the ClusterProfiles of one namespace, or of all.
pub struct ClusterProfiles {
    pub client: Client,
    /// `None` means all namespaces.
    pub namespace: Option<String>,
    pub access: Arc<Access>,
}

impl std::fmt::Debug for ClusterProfiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.describe())
    }
}

impl Provider for ClusterProfiles {
    fn describe(&self) -> String {
        let namespace = self.namespace.as_deref().unwrap_or("*");
        format!("ClusterProfiles {namespace}/*")
    }

    fn covers(&self, origin: &Origin) -> bool {
        origin.is_in(Kind::ClusterProfile, self.namespace.as_ref())
    }

    fn follow(self: Arc<Self>, finds: Finds) -> BoxFuture<'static, ()> {
        async move { self.run(&finds).await }.boxed()
    }
}

type Events = BoxStream<'static, watcher::Result<Event<DynamicObject>>>;
type Asked = (Key, Arc<Plan>, Result<Credential, String>);

/// The known profiles, and at most one running program for each.
#[derive(Default)]
struct Members {
    held: BTreeMap<Key, Held>,
    runs: JoinSet<Asked>,
    running: BTreeMap<Key, AbortHandle>,
}

impl ClusterProfiles {
    async fn run(&self, finds: &Finds) {
        let mut file = self.access.file.clone();
        let mut file_follows = true;
        let mut listed = Listed::default();
        let mut members = Members::default();
        // Restart a failed watch: only a new list shows that the failure is over.
        let (mut events, mut again) = (Some(self.watch()), None);
        let mut pauses = WatchBackoff::default();
        let mut trouble: Option<String> = None;
        let (mut changed, mut wake) = (false, None);
        loop {
            let now = BootTime::now();
            if std::mem::take(&mut changed) || wake.is_some_and(|wake| wake <= now) {
                wake = members.attend(&self.access, now);
                let sources = members.sources(now);
                match (listed.known(), &trouble) {
                    (None, _) => {}
                    (Some(_), None) => finds.found(sources),
                    (Some(_), Some(_)) => finds.known_better(sources),
                }
            }
            tokio::select! {
                event = next(&mut events) => match event {
                    Ok(event) => {
                        let touched = touched(&event);
                        if listed.take(event, |object| Profile::read(&object)) {
                            let file = file.get();
                            changed |= members.follow(&listed, touched.as_ref(), file.as_deref(), &self.access.policy);
                        }
                        if listed.known().is_some() && touched.is_none() {
                            // A complete list ends any earlier failure.
                            (pauses, changed) = (WatchBackoff::default(), true);
                            if trouble.take().is_some() {
                                tracing::info!(provider = self.describe(), "watching again");
                            }
                        }
                        if listed.left_out() {
                            tracing::warn!(
                                provider = self.describe(),
                                "more than {OBJECTS_MAX} ClusterProfiles: the others are left out"
                            );
                        }
                    }
                    Err(why) => {
                        if trouble.as_ref() != Some(&why) {
                            tracing::warn!(provider = self.describe(), problem = why, "looking for ClusterProfiles failed; it is tried again");
                            finds.trouble(why.clone());
                        }
                        trouble = Some(why);
                        events = None;
                        again = pauses.next().map(|pause| BootTime(BootTime::now().0 + pause));
                    }
                },
                () = clock::sleep_until(again, now), if events.is_none() => events = Some(self.watch()),
                news = file.changed(), if file_follows => {
                    file_follows = news.is_ok();
                    let file = file.see();
                    changed |= members.follow(&listed, None, file.as_deref(), &self.access.policy);
                }
                origin = finds.doubted() => changed |= members.doubt(&origin, BootTime::now()),
                Some(asked) = members.runs.join_next(), if !members.runs.is_empty() => {
                    // Otherwise the run was aborted together with its profile.
                    if let Ok((key, plan, answer)) = asked {
                        members.asked(&self.access, &key, &plan, answer);
                        changed = true;
                    }
                }
                () = clock::sleep_until(wake, now), if wake.is_some() => {}
            }
        }
    }

    fn watch(&self) -> Events {
        let resource = profile::api_resource();
        let api: Api<DynamicObject> = match &self.namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &resource),
            None => Api::all_with(self.client.clone(), &resource),
        };
        listed::watch(api, Config::default())
    }
}

/// Returns the next event or the failure. Never resolves without a watch.
async fn next(events: &mut Option<Events>) -> Result<Event<DynamicObject>, String> {
    match events {
        None => std::future::pending().await,
        Some(events) => match events.next().await {
            Some(Ok(event)) => Ok(event),
            Some(Err(error)) if no_such_api(&error) => Err(
                "the cluster has no ClusterProfiles; they are looked for as soon as their CRD (clusterprofiles.multicluster.x-k8s.io, v1alpha1) is there".to_owned(),
            ),
            Some(Err(error)) => Err(chain(&error)),
            None => Err("the watch has ended".to_owned()),
        },
    }
}

fn no_such_api(error: &watcher::Error) -> bool {
    let code = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status.code,
        _ => return false,
    };
    code == 404
}

/// Returns the one profile of an event, or `None` if the event may affect all.
fn touched(event: &Event<DynamicObject>) -> Option<Key> {
    match event {
        Event::Init | Event::InitDone => None,
        Event::InitApply(object) | Event::Apply(object) | Event::Delete(object) => {
            Some(listed::key(object))
        }
    }
}

impl Members {
    /// Takes over listed profiles, one or all. Returns whether a relevant change occurred. Without a change
    /// of the provider file, an event without relevant changes has no effect.
    fn follow(
        &mut self,
        listed: &Listed<Profile>,
        one: Option<&Key>,
        file: Option<&ProviderFile>,
        policy: &Policy,
    ) -> bool {
        let Some(known) = listed.known() else {
            return false;
        };
        let Some(key) = one else {
            let gone = |key: &&Key| !known.contains_key(*key);
            let gone: Vec<Key> = self.held.keys().filter(gone).cloned().collect();
            for key in gone {
                self.forget(&key);
            }
            for (key, profile) in known {
                self.put(key, profile, file, policy);
            }
            return true;
        };
        match known.get(key) {
            None => self.forget(key),
            Some(profile)
                if self
                    .held
                    .get(key)
                    .is_some_and(|held| held.profile == *profile) =>
            {
                false
            }
            Some(profile) => {
                self.put(key, profile, file, policy);
                true
            }
        }
    }

    fn put(&mut self, key: &Key, profile: &Profile, file: Option<&ProviderFile>, policy: &Policy) {
        let wanted = access_plan::plan(profile, file, policy);
        match self.held.get_mut(key) {
            // A recreated profile with the same name is a different profile.
            Some(held) if held.profile.uid == profile.uid => {
                held.profile = profile.clone();
                held.want(wanted);
            }
            _ => {
                self.forget(key);
                self.held
                    .insert(key.clone(), Held::new(profile.clone(), wanted));
            }
        }
    }

    /// Removes a profile and aborts its running program.
    fn forget(&mut self, key: &Key) -> bool {
        if let Some(run) = self.running.remove(key) {
            run.abort();
        }
        self.held.remove(key).is_some()
    }

    fn doubt(&mut self, origin: &Origin, now: BootTime) -> bool {
        let key = (
            origin.namespace.clone().unwrap_or_default(),
            origin.name.clone(),
        );
        let held = self.held.get_mut(&key);
        held.map(|held| held.doubt(now)).is_some()
    }

    /// Starts all due work and returns when to check again.
    fn attend(&mut self, access: &Arc<Access>, now: BootTime) -> Option<BootTime> {
        let mut wake: Option<BootTime> = None;
        for (key, held) in &mut self.held {
            let Some(plan) = held.plan() else {
                wake = wake.into_iter().chain(held.turns(now)).min();
                continue;
            };
            let mut due = held.due(now);
            if due == Due::Rebuild {
                let good = held.good().cloned();
                if let Some(good) = good {
                    let before = Some(&good);
                    let credential = good.credential.clone();
                    let built = access.put_to_use(&plan, credential, good.life, before);
                    if let Err(problem) = &built {
                        tracing::warn!(origin = %held.profile.origin, provider = plan.command.provider, problem, "the credential could not be put to use; it is tried again");
                    }
                    held.rebuilt(built, now, rand::random());
                }
                due = held.due(now);
            }
            match due {
                Due::Nothing | Due::Rebuild => {}
                Due::At(at) => wake = wake.into_iter().chain([at]).min(),
                Due::Run => {
                    held.started(now);
                    let (key, access) = (key.clone(), Arc::clone(access));
                    let of = key.clone();
                    let run = self.runs.spawn(async move {
                        let answer = access.ask(&plan).await;
                        (key, plan, answer)
                    });
                    self.running.insert(of, run);
                }
            }
            wake = wake.into_iter().chain(held.turns(now)).min();
        }
        wake
    }

    fn asked(
        &mut self,
        access: &Access,
        key: &Key,
        plan: &Arc<Plan>,
        answer: Result<Credential, String>,
    ) {
        let Some(held) = self.held.get_mut(key) else {
            return;
        };
        self.running.remove(key);
        let (now, jitter) = (BootTime::now(), rand::random());
        if held.plan().as_ref() != Some(plan) {
            held.dropped();
            return;
        }
        let outcome = answer.and_then(|credential| {
            let life =
                Life::of(credential.expires, clock::wall(), now, jitter).ok_or_else(|| {
                    let program = &plan.command.program;
                    format!("{program} has given a credential that has expired already")
                })?;
            access.put_to_use(plan, credential, life, held.good())
        });
        if let Err(problem) = &outcome {
            tracing::warn!(origin = %held.profile.origin, provider = plan.command.provider, problem, "no new credential; it is tried again");
        }
        held.ended(outcome, now, jitter);
    }

    fn sources(&mut self, now: BootTime) -> BTreeMap<Origin, Arc<Source>> {
        let source = |held: &mut Held| {
            let (access, stale) = held.say(now);
            let profile = &held.profile;
            let source = Source {
                origin: profile.origin.clone(),
                uid: profile.uid.clone(),
                member: profile.member.clone(),
                since: profile.since,
                access,
                stale,
                suspended: None,
            };
            (profile.origin.clone(), Arc::new(source))
        };
        self.held.values_mut().map(source).collect()
    }
}

#[cfg(test)]
mod tests;
