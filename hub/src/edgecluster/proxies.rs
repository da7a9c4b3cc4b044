//! The proxies of members, one for each source.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use krypton_types::allowed_namespaces::AllowedNamespaces;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use crate::members::member::Member;
use crate::proxy::{self, Access, Permit, ProxyInputs, Shared};

/// A member's proxy.
pub(super) struct RunningProxy {
    pub(super) access: watch::Sender<Access>,
    pub(super) permit: watch::Sender<Permit>,
    pub(super) allowed: watch::Sender<AllowedNamespaces>,
    pub(super) stop: CancellationToken,
    pub(super) task: JoinHandle<()>,
}

#[derive(Default)]
pub(super) struct Proxies {
    pub(super) running: BTreeMap<String, RunningProxy>,
    /// Members whose proxy is stopping.
    stopping: BTreeSet<String>,
    stop_tasks: JoinSet<String>,
}

impl Proxies {
    /// Whether a proxy of the member is stopping.
    pub(super) fn is_stopping(&self, name: &str) -> bool {
        self.stopping.contains(name)
    }

    /// Passes the access to the member's proxy. Starts a proxy if the member has none.
    pub(super) fn start_or_update(
        &mut self,
        name: &str,
        access: Access,
        shared: &Arc<Shared>,
        member: &Member,
    ) {
        if let Some(proxy) = self.running.get(name) {
            update(&proxy.access, access);
        } else if !self.stopping.contains(name) {
            let proxy = start(shared, name, access, member);
            self.running.insert(name.to_owned(), proxy);
        }
    }

    /// Stops the proxies that are not to stay.
    pub(super) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        let removed = self.running.extract_if(.., |name, _| !keep(name));
        for (name, proxy) in removed {
            tracing::info!(member = %name, "stopping proxy; releases stay installed");
            proxy.stop.cancel();
            self.stopping.insert(name.clone());
            self.stop_tasks.spawn(async move {
                join(&name, proxy.task).await;
                name
            });
        }
    }

    /// The next member whose proxy has stopped. Waits for ever where none is stopping.
    pub(super) async fn next_stopped(&mut self) -> Option<String> {
        match self.stop_tasks.join_next().await {
            Some(Ok(name)) => {
                self.stopping.remove(&name);
                Some(name)
            }
            Some(Err(_)) => None,
            None => std::future::pending().await,
        }
    }

    /// Stops all, and waits for them.
    pub(super) async fn stop(mut self) {
        for proxy in self.running.values() {
            proxy.stop.cancel();
        }
        for (name, proxy) in self.running {
            join(&name, proxy.task).await;
        }
        while self.stop_tasks.join_next().await.is_some() {}
    }
}

async fn join(name: &str, task: JoinHandle<()>) {
    if let Err(error) = task.await {
        tracing::error!(member = %name, %error, "the proxy failed");
    }
}

fn start(shared: &Arc<Shared>, name: &str, access: Access, member: &Member) -> RunningProxy {
    let (access, access_rx) = watch::channel(access);
    let (permit, permit_rx) = watch::channel(Permit::default());
    let (allowed, allowed_rx) = watch::channel(AllowedNamespaces::default());
    let stop = CancellationToken::new();
    let inputs = ProxyInputs {
        access: access_rx,
        permit: permit_rx,
        published: member.published.subscribe(),
        presence: shared.members.presence(name),
        allowed: allowed_rx,
    };
    let proxy_task = proxy::run(name.to_owned(), Arc::clone(shared), inputs, stop.clone());
    let span = tracing::error_span!("proxy", member = name);
    let task_name = format!("the proxy of member {name}");
    let proxy_task = shared.watchdog.watch(task_name, proxy_task);
    let task = tokio::spawn(proxy_task.instrument(span));
    RunningProxy {
        access,
        permit,
        allowed,
        stop,
        task,
    }
}

/// Ignores a kubeconfig of the same content.
fn update(channel: &watch::Sender<Access>, access: Access) {
    channel.send_if_modified(|current| {
        let changed = match (&*current, &access) {
            (Access::Kubeconfig(a, current), Access::Kubeconfig(b, next)) => {
                a != b || current != next
            }
            (Access::Home(_), Access::Home(_)) => false,
            _ => true,
        };
        if changed {
            *current = access;
        }
        changed
    });
}
