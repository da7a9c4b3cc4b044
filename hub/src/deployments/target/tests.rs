use krypton_crds::krypton_deployment::{
    Account, ClusterProfileRef, KubeconfigSecret, Region, RegionKubeconfig,
};

use super::*;

fn spec(change: impl FnOnce(&mut Region)) -> KryptonDeploymentSpec {
    let mut region = Region {
        name: "paris".to_owned(),
        ..Region::default()
    };
    change(&mut region);
    KryptonDeploymentSpec {
        account: Account {
            name: "acme".to_owned(),
            ..Account::default()
        },
        region,
    }
}

fn secret(namespace: &str, name: &str) -> SecretName {
    SecretName {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    }
}

fn given(namespace: &str, name: &str, key: &str) -> Option<RegionKubeconfig> {
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    Some(RegionKubeconfig {
        secret: Some(KubeconfigSecret {
            name: some(name),
            namespace: some(namespace),
            key: some(key),
        }),
    })
}

#[test]
fn secret_precedes_deprecated_field_and_region_name() {
    let all = |region: &mut Region| {
        region.kubeconfig = given("team", "admin", "admin.conf");
        region.kubeconfig_secret_name = Some("old".to_owned());
    };
    let of = |named: Named| match named {
        Named::Secret {
            secret,
            key,
            by_default,
        } => (secret.to_string(), key, by_default),
        Named::Profile { .. } => unreachable!("none was named"),
    };
    let name_only = spec(|it| it.kubeconfig = given("", "admin", ""));
    let deprecated = spec(|it| it.kubeconfig_secret_name = Some("old".to_owned()));
    // A namespace without a name says nothing.
    let no_name = spec(|it| {
        it.kubeconfig = given("team", "", "value");
        it.kubeconfig_secret_name = Some("old".to_owned());
    });
    let empty = spec(|it| it.kubeconfig_secret_name = Some(String::new()));
    for (what, spec, secret, key, by_default) in [
        ("all", spec(all), "team/admin", Some("admin.conf"), false),
        ("a name only", name_only, "fleet/admin", None, false),
        ("the deprecated field", deprecated, "fleet/old", None, false),
        ("no name", no_name, "fleet/old", Some("value"), false),
        (
            "an empty field",
            empty,
            "fleet/paris-kubeconfig",
            None,
            true,
        ),
        (
            "nothing",
            spec(|_| {}),
            "fleet/paris-kubeconfig",
            None,
            true,
        ),
    ] {
        let expected = (secret.to_owned(), key.map(str::to_owned), by_default);
        assert_eq!(of(named(&spec, "fleet")), expected, "{what}");
    }
    let profile = spec(|it| {
        all(it);
        it.cluster_profile_ref = Some(ClusterProfileRef {
            name: "p".to_owned(),
            namespace: "inventory".to_owned(),
        });
    });
    let expected = Named::Profile {
        namespace: "inventory".to_owned(),
        name: "p".to_owned(),
    };
    assert_eq!(named(&profile, "fleet"), expected);
}

#[derive(Default)]
struct World {
    clusters: BTreeMap<String, Cluster>,
    findings: BTreeMap<SecretName, Finding>,
}

impl World {
    fn member(mut self, name: &str, source: Option<SourceRef>) -> Self {
        let cluster = Cluster {
            source,
            cluster_uid: Some(format!("uid-of-{name}")),
            ..Cluster::default()
        };
        self.clusters.insert(name.to_owned(), cluster);
        self
    }

    fn finding(mut self, of: &SecretName, finding: Finding) -> Self {
        self.findings.insert(of.clone(), finding);
        self
    }

    /// Changes a member.
    fn with(mut self, name: &str, change: impl FnOnce(&mut Cluster)) -> Self {
        change(self.clusters.get_mut(name).unwrap());
        self
    }

    /// Returns the member, or the reason why there is none.
    #[track_caller]
    fn aims(&self, named: &Named, expected: Result<&str, &str>, what: &str) {
        let expected = expected.map(str::to_owned).map_err(str::to_owned);
        assert_eq!(self.select(named, "team"), expected, "{what}");
    }

    fn select(&self, named: &Named, from: &str) -> Result<String, String> {
        let open_namespaces = ["fleet".to_owned()].into();
        let mut clusters = Clusters::default();
        for (name, cluster) in &self.clusters {
            clusters.insert(name.clone(), Cluster::default());
            clusters.insert(name.clone(), cluster.clone());
        }
        let sight = Sight {
            clusters: &clusters,
            findings: &self.findings,
            open_namespaces: &open_namespaces,
        };
        let aimed = select(named, "paris", from, sight);
        aimed
            .map(|(member, _)| member)
            .map_err(|state| state.reason)
    }
}

fn there(open: bool) -> Finding {
    Finding::There {
        member: "admin".to_owned(),
        open,
    }
}

fn by(secret: &SecretName) -> Named {
    Named::Secret {
        secret: secret.clone(),
        key: None,
        by_default: false,
    }
}

#[test]
fn secret_is_open_to_its_namespace_unless_labelled() {
    let (theirs, hubs) = (secret("team", "admin"), secret("fleet", "admin"));
    for (of, from, finding, allowed) in [
        (&theirs, "team", there(false), true),
        (&theirs, "other", there(false), false),
        (&theirs, "other", there(true), true),
        // Who may not name it is not told whether it is there.
        (&theirs, "other", Finding::NotThere, false),
        (&theirs, "other", Finding::Unread("why".to_owned()), false),
        (&hubs, "other", there(false), true),
    ] {
        let world = World::default()
            .member("admin", Some(of.origin().source_ref()))
            .finding(of, finding.clone());
        let aimed = world.select(&by(of), from);
        let expected = if allowed {
            Ok("admin".to_owned())
        } else {
            Err("SecretNotAllowed".to_owned())
        };
        assert_eq!(aimed, expected, "{of} from {from}: {finding:?}");
    }
}

#[test]
fn pending_target_differs_from_impossible_one() {
    let of = secret("fleet", "admin");
    let world = World::default;
    let member = || world().member("admin", Some(of.origin().source_ref()));
    let other = Some(secret("elsewhere", "admin").origin().source_ref());
    let unread = || Finding::Unread("no answer".to_owned());
    let strange = Finding::There {
        member: "Not A Name".to_owned(),
        open: false,
    };
    let found = |finding| member().finding(&of, finding);
    let taken = world().member("admin", other);
    for (what, world, expected) in [
        ("not looked for yet", member(), Err("Starting")),
        ("gone", found(Finding::NotThere), Err("SecretNotFound")),
        // What is known of it stands.
        ("unread, and known", found(unread()), Ok("admin")),
        (
            "unread",
            world().finding(&of, unread()),
            Err("SourceUnavailable"),
        ),
        (
            "no member yet",
            world().finding(&of, there(false)),
            Err("Starting"),
        ),
        (
            "the name is another's",
            taken.finding(&of, there(false)),
            Err("NameTaken"),
        ),
        ("no name", world().finding(&of, strange), Err("NotAName")),
    ] {
        world.aims(&by(&of), expected, what);
    }
}

#[test]
fn target_of_duplicate_members_is_the_acting_one() {
    let of = secret("fleet", "admin");
    let mut world = World::default()
        .member("admin", Some(of.origin().source_ref()))
        .member("kamaji", None)
        .member("another", None)
        .finding(&of, there(false));
    for (name, uid) in [("admin", "u"), ("kamaji", "u"), ("another", "v")] {
        world.clusters.get_mut(name).unwrap().cluster_uid = Some(uid.to_owned());
    }
    assert_eq!(world.select(&by(&of), "team").unwrap(), "admin");
    world.clusters.get_mut("admin").unwrap().duplicate = true;
    assert_eq!(world.select(&by(&of), "team").unwrap(), "kamaji");
    // It says who may aim at it.
    let kamaji = world.clusters.get_mut("kamaji").unwrap();
    kamaji.allowed = Allowed::new(Some(&["other".to_owned()]));
    world.aims(&by(&of), Err("NamespaceNotAllowed"), "closed");
}

#[test]
fn joined_region_needs_no_secret_unless_named() {
    let default = named(&spec(|_| {}), "fleet");
    let world = World::default().member("paris", None);
    assert_eq!(world.select(&default, "team").unwrap(), "paris");
    world.aims(&by(&secret("fleet", "admin")), Err("Starting"), "named");
    // A member of that name with a source is somebody's of its own.
    let other = secret("elsewhere", "paris").origin().source_ref();
    let world = World::default().member("paris", Some(other));
    assert_eq!(world.select(&default, "team").unwrap_err(), "Starting");
    let home = by(&secret("fleet", names::SELF_CLUSTER));
    let with_home = World::default().member(names::SELF_CLUSTER, None);
    assert_eq!(
        with_home.select(&home, "team").unwrap(),
        names::SELF_CLUSTER
    );
    World::default().aims(&home, Err("SourceGone"), "no home");
}

#[test]
fn unreached_cluster_is_awaited_or_its_fault_reported() {
    let of = secret("fleet", "admin");
    let mut world = World::default()
        .member("admin", Some(of.origin().source_ref()))
        .finding(&of, there(false));
    let cluster = world.clusters.get_mut("admin").unwrap();
    cluster.cluster_uid = None;
    assert_eq!(world.select(&by(&of), "team").unwrap_err(), "Starting");
    let cluster = world.clusters.get_mut("admin").unwrap();
    cluster.resolved = Some(State::new(Truth::False, "KubeconfigInvalid", "no such key"));
    world.aims(&by(&of), Err("KubeconfigInvalid"), "bad kubeconfig");
}

#[test]
fn profile_resolves_to_its_member_and_reports_state() {
    let of = |kind, namespace: &str, name: &str| Origin {
        kind,
        namespace: Some(namespace.to_owned()),
        name: name.to_owned(),
    };
    let profile =
        |namespace: &str, name: &str| Some(of(Kind::ClusterProfile, namespace, name).source_ref());
    let named = Named::Profile {
        namespace: "inventory".to_owned(),
        name: "paris".to_owned(),
    };
    let member = |source| World::default().member("edge-1", source);
    let paris = || member(profile("inventory", "paris"));
    let secret = of(Kind::Secret, "inventory", "paris").source_ref();
    let closed = paris().with("edge-1", |member| {
        member.allowed = Allowed::new(Some(&["other".to_owned()]));
    });
    let unreached = || paris().with("edge-1", |member| member.cluster_uid = None);
    let not_ready = State::new(Truth::False, "ClusterProfileNotReady", "not healthy");
    let not_ready = unreached().with("edge-1", |member| member.resolved = Some(not_ready));
    let by_agent = World::default().member("paris", None);
    let not_found = Err("ClusterProfileNotFound");
    for (what, world, expected) in [
        // Whatever the member is called, and without a word on Secrets.
        ("found", paris(), Ok("edge-1")),
        ("none", World::default(), not_found),
        (
            "other namespace",
            member(profile("elsewhere", "paris")),
            not_found,
        ),
        (
            "other name",
            member(profile("inventory", "edge-1")),
            not_found,
        ),
        ("other kind", member(Some(secret)), not_found),
        ("an agent's of the region's name", by_agent, not_found),
        ("not for this namespace", closed, Err("NamespaceNotAllowed")),
        ("not reached yet", unreached(), Err("Starting")),
        ("not ready", not_ready, Err("ClusterProfileNotReady")),
    ] {
        world.aims(&named, expected, what);
    }
}

#[test]
fn members_are_found_by_current_source_and_uid() {
    let source = |name: &str| SourceRef {
        kind: "Secret".to_owned(),
        namespace: Some("fleet".to_owned()),
        name: Some(name.to_owned()),
    };
    let cluster = |name: &str, uid: Option<&str>| Cluster {
        source: Some(source(name)),
        cluster_uid: uid.map(str::to_owned),
        ..Cluster::default()
    };
    let mut clusters = Clusters::default();
    let acts = |clusters: &Clusters, uid: &str| acting(uid, "none", clusters);
    clusters.insert("b".to_owned(), cluster("s", None));
    assert_eq!(acts(&clusters, "u"), None);
    clusters.learn(|name| (name == "b").then(|| "u".to_owned()));
    assert_eq!(acts(&clusters, "u").as_deref(), Some("b"));
    clusters.insert("a".to_owned(), cluster("s", Some("u")));
    assert_eq!(acts(&clusters, "u").as_deref(), Some("a"), "first by name");
    assert_eq!(member_of(&source("s"), &clusters).as_deref(), Some("a"));
    clusters.insert("a".to_owned(), cluster("t", Some("v")));
    assert_eq!(acts(&clusters, "u").as_deref(), Some("b"));
    assert_eq!(member_of(&source("s"), &clusters).as_deref(), Some("b"));
    assert_eq!(member_of(&source("t"), &clusters).as_deref(), Some("a"));
    clusters.retain(|name| name == "a");
    assert_eq!(acts(&clusters, "u"), None);
    assert_eq!(member_of(&source("s"), &clusters), None);
    assert!(clusters.remove("a").is_some());
    let Clusters {
        all,
        by_source,
        by_uid,
        unreached,
    } = clusters;
    assert!(all.is_empty() && by_source.is_empty() && by_uid.is_empty() && unreached.is_empty());
}
