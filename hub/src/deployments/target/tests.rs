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

fn kubeconfig_ref(namespace: &str, name: &str, key: &str) -> Option<RegionKubeconfig> {
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
        region.kubeconfig = kubeconfig_ref("team", "admin", "admin.conf");
        region.kubeconfig_secret_name = Some("old".to_owned());
    };
    let secret_fields = |reference: TargetReference| match reference {
        TargetReference::Secret {
            secret,
            key,
            is_default,
        } => (secret.to_string(), key, is_default),
        TargetReference::Profile { .. } => unreachable!("none was named"),
    };
    let name_only = spec(|it| it.kubeconfig = kubeconfig_ref("", "admin", ""));
    let deprecated = spec(|it| it.kubeconfig_secret_name = Some("old".to_owned()));
    // A namespace without a name has no effect.
    let no_name = spec(|it| {
        it.kubeconfig = kubeconfig_ref("team", "", "value");
        it.kubeconfig_secret_name = Some("old".to_owned());
    });
    let empty = spec(|it| it.kubeconfig_secret_name = Some(String::new()));
    let of_region = "fleet/paris-kubeconfig";
    for (case, spec, secret, key, is_default) in [
        ("all", spec(all), "team/admin", Some("admin.conf"), false),
        ("a name only", name_only, "fleet/admin", None, false),
        ("the deprecated field", deprecated, "fleet/old", None, false),
        ("no name", no_name, "fleet/old", Some("value"), false),
        ("an empty field", empty, of_region, None, true),
        ("nothing", spec(|_| {}), of_region, None, true),
    ] {
        let expected = (secret.to_owned(), key.map(str::to_owned), is_default);
        let reference = target_reference(&spec, "fleet");
        assert_eq!(secret_fields(reference), expected, "{case}");
    }
    let profile = spec(|it| {
        all(it);
        it.cluster_profile_ref = Some(ClusterProfileRef {
            name: "p".to_owned(),
            namespace: "inventory".to_owned(),
        });
    });
    let expected = TargetReference::Profile {
        namespace: "inventory".to_owned(),
        name: "p".to_owned(),
    };
    assert_eq!(target_reference(&profile, "fleet"), expected);
}

#[derive(Default)]
struct SelectionFixture {
    members: BTreeMap<String, TargetMember>,
    secret_states: BTreeMap<SecretName, SecretState>,
}

impl SelectionFixture {
    fn member(mut self, name: &str, source: Option<SourceRef>) -> Self {
        let member = TargetMember {
            source,
            cluster_uid: Some(format!("uid-of-{name}")),
            ..TargetMember::default()
        };
        self.members.insert(name.to_owned(), member);
        self
    }

    fn secret_state(mut self, secret: &SecretName, secret_state: SecretState) -> Self {
        self.secret_states.insert(secret.clone(), secret_state);
        self
    }

    /// Changes a member.
    fn with(mut self, name: &str, change: impl FnOnce(&mut TargetMember)) -> Self {
        change(self.members.get_mut(name).unwrap());
        self
    }

    /// Returns the member, or the reason why there is none.
    #[track_caller]
    fn assert_selected(
        &self,
        reference: &TargetReference,
        expected: Result<&str, &str>,
        case: &str,
    ) {
        let expected = expected.map(str::to_owned).map_err(str::to_owned);
        assert_eq!(self.select(reference, "team"), expected, "{case}");
    }

    fn select(&self, reference: &TargetReference, namespace: &str) -> Result<String, String> {
        let open_namespaces = ["fleet".to_owned()].into();
        let inputs = SelectionInputs {
            members: &MemberIndex::new(&self.members),
            secret_states: &self.secret_states,
            open_namespaces: &open_namespaces,
        };
        let selected = select(reference, "paris", namespace, inputs);
        selected
            .map(|(member, _)| member)
            .map_err(|state| state.reason)
    }
}

fn existing_secret(open: bool) -> SecretState {
    SecretState::Present {
        member: "admin".to_owned(),
        open,
    }
}

fn secret_reference(secret: &SecretName) -> TargetReference {
    TargetReference::Secret {
        secret: secret.clone(),
        key: None,
        is_default: false,
    }
}

#[test]
fn secret_is_open_to_its_namespace_unless_labelled() {
    let (team_secret, hub_secret) = (secret("team", "admin"), secret("fleet", "admin"));
    let unread = SecretState::Unread("why".to_owned());
    for (secret_name, namespace, secret_state, allowed) in [
        (&team_secret, "team", existing_secret(false), true),
        (&team_secret, "other", existing_secret(false), false),
        (&team_secret, "other", existing_secret(true), true),
        // An object that may not name the Secret does not learn whether it exists.
        (&team_secret, "other", SecretState::Absent, false),
        (&team_secret, "other", unread, false),
        (&hub_secret, "other", existing_secret(false), true),
    ] {
        let fixture = SelectionFixture::default()
            .member("admin", Some(secret_name.origin().source_ref()))
            .secret_state(secret_name, secret_state.clone());
        let selected = fixture.select(&secret_reference(secret_name), namespace);
        let expected = match allowed {
            true => Ok("admin".to_owned()),
            false => Err("SecretNotAllowed".to_owned()),
        };
        assert_eq!(selected, expected, "{namespace}: {secret_state:?}");
    }
}

#[test]
fn pending_target_differs_from_impossible_one() {
    let admin = secret("fleet", "admin");
    let fixture = SelectionFixture::default;
    let member = || fixture().member("admin", Some(admin.origin().source_ref()));
    let other_source = Some(secret("elsewhere", "admin").origin().source_ref());
    let unreadable = || SecretState::Unread("no answer".to_owned());
    let invalid_name = SecretState::Present {
        member: "Not A Name".to_owned(),
        open: false,
    };
    let (absent, existing) = (SecretState::Absent, || existing_secret(false));
    let name_taken = fixture().member("admin", other_source);
    for (case, fixture, secret_state, expected) in [
        ("gone", member(), absent, Err("SecretNotFound")),
        // A known member stays the target.
        ("unread, and known", member(), unreadable(), Ok("admin")),
        ("unread", fixture(), unreadable(), Err("SourceUnavailable")),
        ("no member yet", fixture(), existing(), Err("Starting")),
        ("name taken", name_taken, existing(), Err("NameTaken")),
        ("no name", fixture(), invalid_name, Err("NotAName")),
    ] {
        let fixture = fixture.secret_state(&admin, secret_state);
        fixture.assert_selected(&secret_reference(&admin), expected, case);
    }
    member().assert_selected(&secret_reference(&admin), Err("Starting"), "no state");
}

#[test]
fn target_of_duplicate_members_is_the_acting_one() {
    let admin = secret("fleet", "admin");
    let fixture = SelectionFixture::default()
        .member("admin", Some(admin.origin().source_ref()))
        .member("kamaji", None)
        .member("another", None)
        .with("kamaji", |member| {
            member.cluster_uid = Some("uid-of-admin".to_owned())
        })
        .secret_state(&admin, existing_secret(false));
    let reference = secret_reference(&admin);
    fixture.assert_selected(&reference, Ok("admin"), "no duplicate");
    let fixture = fixture.with("admin", |member| member.is_duplicate = true);
    fixture.assert_selected(&reference, Ok("kamaji"), "duplicate");
    // The acting member restricts the namespaces that may target it.
    let fixture = fixture.with("kamaji", |member| {
        member.allowed = AllowedNamespaces::new(Some(&["other".to_owned()]));
    });
    fixture.assert_selected(&reference, Err("NamespaceNotAllowed"), "closed");
}

#[test]
fn joined_region_needs_no_secret_unless_named() {
    let default = target_reference(&spec(|_| {}), "fleet");
    let fixture = SelectionFixture::default().member("paris", None);
    fixture.assert_selected(&default, Ok("paris"), "joined");
    let named = secret_reference(&secret("fleet", "admin"));
    fixture.assert_selected(&named, Err("Starting"), "named");
    // A member of that name with a source of its own is not the region.
    let other_source = secret("elsewhere", "paris").origin().source_ref();
    let fixture = SelectionFixture::default().member("paris", Some(other_source));
    fixture.assert_selected(&default, Err("Starting"), "other source");
    let home = secret_reference(&secret("fleet", names::SELF_CLUSTER));
    let with_home = SelectionFixture::default().member(names::SELF_CLUSTER, None);
    with_home.assert_selected(&home, Ok(names::SELF_CLUSTER), "home");
    SelectionFixture::default().assert_selected(&home, Err("SourceGone"), "no home");
}

#[test]
fn unreached_cluster_is_awaited_or_its_fault_reported() {
    let admin = secret("fleet", "admin");
    let fixture = SelectionFixture::default()
        .member("admin", Some(admin.origin().source_ref()))
        .secret_state(&admin, existing_secret(false))
        .with("admin", |member| member.cluster_uid = None);
    let reference = secret_reference(&admin);
    fixture.assert_selected(&reference, Err("Starting"), "no UID");
    let invalid = State::new(Truth::False, "KubeconfigInvalid", "no such key");
    let fixture = fixture.with("admin", |member| member.resolved = Some(invalid));
    fixture.assert_selected(&reference, Err("KubeconfigInvalid"), "invalid");
}

#[test]
fn profile_resolves_to_its_member_and_reports_state() {
    let origin = |kind, namespace: &str, name: &str| Origin {
        kind,
        namespace: Some(namespace.to_owned()),
        name: name.to_owned(),
    };
    let profile = |namespace: &str, name: &str| {
        Some(origin(SourceKind::ClusterProfile, namespace, name).source_ref())
    };
    let reference = TargetReference::Profile {
        namespace: "inventory".to_owned(),
        name: "paris".to_owned(),
    };
    let member = |source| SelectionFixture::default().member("edge-1", source);
    let paris = || member(profile("inventory", "paris"));
    let secret = origin(SourceKind::Secret, "inventory", "paris").source_ref();
    let not_allowed = paris().with("edge-1", |member| {
        member.allowed = AllowedNamespaces::new(Some(&["other".to_owned()]));
    });
    let without_uid = || paris().with("edge-1", |member| member.cluster_uid = None);
    let not_ready = State::new(Truth::False, "ClusterProfileNotReady", "not healthy");
    let not_ready = without_uid().with("edge-1", |member| member.resolved = Some(not_ready));
    let by_agent = SelectionFixture::default().member("paris", None);
    let elsewhere = member(profile("elsewhere", "paris"));
    let other_name = member(profile("inventory", "edge-1"));
    let not_found = Err("ClusterProfileNotFound");
    for (case, fixture, expected) in [
        // The name of the member and the Secrets do not matter.
        ("found", paris(), Ok("edge-1")),
        ("none", SelectionFixture::default(), not_found),
        ("other namespace", elsewhere, not_found),
        ("other name", other_name, not_found),
        ("other kind", member(Some(secret)), not_found),
        ("an agent's of the region's name", by_agent, not_found),
        ("not allowed", not_allowed, Err("NamespaceNotAllowed")),
        ("not reached yet", without_uid(), Err("Starting")),
        ("not ready", not_ready, Err("ClusterProfileNotReady")),
    ] {
        fixture.assert_selected(&reference, expected, case);
    }
}

#[test]
fn members_are_found_by_source_and_uid() {
    let source = |name: &str| SourceRef {
        kind: "Secret".to_owned(),
        namespace: Some("fleet".to_owned()),
        name: Some(name.to_owned()),
    };
    let member = |source_name: &str, uid: Option<&str>| TargetMember {
        source: Some(source(source_name)),
        cluster_uid: uid.map(str::to_owned),
        ..TargetMember::default()
    };
    let mut members: BTreeMap<String, TargetMember> = [
        ("a", member("s", Some("u"))),
        ("b", member("s", Some("u"))),
        ("c", member("t", None)),
    ]
    .map(|(name, member)| (name.to_owned(), member))
    .into();
    let acting = |members: &BTreeMap<String, TargetMember>, uid: &str, preferred: &str| {
        acting_member(uid, preferred, &MemberIndex::new(members))
    };
    assert_eq!(acting(&members, "u", "c").as_deref(), Some("a"));
    assert_eq!(acting(&members, "u", "b").as_deref(), Some("b"));
    assert_eq!(acting(&members, "v", "c"), None);
    for (name, expected) in [("s", Some("a")), ("t", Some("c")), ("other", None)] {
        let found = member_by_source(&source(name), &MemberIndex::new(&members));
        assert_eq!(found.as_deref(), expected, "{name}");
    }
    // A recorded UID precedes an observed one.
    add_observed_uids(&mut members, |_| Some("v".to_owned()));
    assert_eq!(acting(&members, "v", "none").as_deref(), Some("c"));
    assert_eq!(acting(&members, "u", "none").as_deref(), Some("a"));
}
