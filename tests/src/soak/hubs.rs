//! Runs the hubs of home, each with a separate port, agent connection and home connection.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use krypton_tests::{
    Cluster, FaultLine, FaultProxy, Hub, HubOptions, Traffic,
    fleet::{HUB_NAMESPACE, PATIENCE},
    port::Port,
};
use krypton_types::names::HUB_LEASE;

use anyhow::{Context, Result};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use tokio::sync::Mutex;

use super::{stage::VERSIONS, whom::Seat};

const LEADER: &str = "krypton_hub_leader ";

/// A hub with its connections.
pub(crate) struct Post {
    pub(crate) seat: Seat,
    pub(crate) hub: Mutex<Hub>,
    place: Place,
}

/// The parts that outlive the process.
struct Place {
    port: Arc<Port>,
    /// The connection from agents.
    link: FaultLine,
    /// The connection to home.
    way: FaultProxy,
}

pub(crate) struct Hubs {
    posts: Vec<Post>,
    /// Flags of all hubs, except the version of the chart.
    flags: Vec<String>,
    version: AtomicU32,
}

impl Hubs {
    /// Starts `count` hubs, and waits until each is ready. Agents get the addresses of all hubs.
    pub(crate) async fn start(home: &Cluster, count: usize, flags: Vec<String>) -> Result<Self> {
        let mut places = Vec::new();
        for seat in Seat::first(count) {
            let port = Arc::new(Port::reserve()?);
            let link = FaultLine::to(port.address()).await?;
            let way = FaultProxy::before(home).await?;
            places.push((*seat, Place { port, link, way }));
        }
        let lines: Vec<String> = (places.iter())
            .map(|(_, place)| place.link.address().to_string())
            .collect();
        let mut hubs = Self {
            posts: Vec::new(),
            flags: [flags, vec![format!("--advertise={}", lines.join(","))]].concat(),
            version: AtomicU32::new(0),
        };
        for (seat, place) in places {
            let mut hub = hubs.process(seat, &place)?;
            hub.ready(PATIENCE).await?;
            hubs.posts.push(Post {
                seat,
                hub: Mutex::new(hub),
                place,
            });
        }
        Ok(hubs)
    }

    fn process(&self, seat: Seat, place: &Place) -> Result<Hub> {
        let number = self.version.load(Ordering::SeqCst);
        let version = VERSIONS.get(number as usize).unwrap_or(&VERSIONS[0]);
        let home = place.way.kubeconfig();
        let options = HubOptions::new(&home)
            .args(&self.flags)
            .args([format!("--chart-version={version}")])
            .env("POD_NAME", seat.name())
            .at(&place.port);
        Hub::start(&options)
    }

    /// Starts another process after one has ended.
    pub(crate) fn start_again(&self, post: &Post, hub: &mut Hub) -> Result<()> {
        *hub = self.process(post.seat, &post.place)?;
        Ok(())
    }

    /// Sets the chart version of all hubs that start later.
    pub(crate) fn set_version(&self, number: u32) {
        self.version.store(number, Ordering::SeqCst);
    }

    pub(crate) fn all(&self) -> &[Post] {
        &self.posts
    }

    pub(crate) fn at(&self, seat: Seat) -> Result<&Post> {
        let found = self.posts.iter().find(|post| post.seat == seat);
        found.with_context(|| format!("there is no {}", seat.name()))
    }

    /// Sets the traffic between agents and this hub, or all hubs.
    pub(crate) fn set_links(&self, seat: Option<Seat>, traffic: Traffic) {
        for post in &self.posts {
            if seat.is_none_or(|seat| seat == post.seat) {
                post.place.link.set(traffic);
            }
        }
    }

    pub(crate) fn good_again(&self) {
        self.set_links(None, Traffic::Pass);
        self.posts
            .iter()
            .for_each(|post| post.set_way(Traffic::Pass));
    }

    /// Returns whether each hub reports in its metrics that it is the leader. Omits hubs that don't respond.
    pub(crate) async fn leading(&self) -> BTreeMap<Seat, bool> {
        let mut states = BTreeMap::new();
        for post in &self.posts {
            let metrics = post.hub.lock().await.metrics().await.unwrap_or_default();
            let leader = metrics.lines().find_map(|line| line.strip_prefix(LEADER));
            states.extend(leader.map(|value| (post.seat, value == "1")));
        }
        states
    }
}

impl Post {
    /// Sets the traffic between the hub and home.
    pub(crate) fn set_way(&self, traffic: Traffic) {
        self.place.way.set(traffic);
    }
}

/// Returns the holder of the leader election Lease, or an empty string.
pub(crate) async fn holder(home: &Client) -> Result<String> {
    let leases: Api<Lease> = Api::namespaced(home.clone(), HUB_NAMESPACE);
    let lease = leases
        .get(HUB_LEASE)
        .await
        .context("reading the leader Lease")?;
    Ok(lease
        .spec
        .unwrap_or_default()
        .holder_identity
        .unwrap_or_default())
}
