//! Owners of a release, and the right to use its workspace.

use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::revision::Revision;
use krypton_types::names;

use super::view::View;
use crate::index::Workspace;
use crate::owner::ReleaseOwner;

/// Annotation on a Tenant that Krypton recreated after the deletion of its CRD: its previous UIDs, newest first,
/// separated by commas.
pub const PREVIOUS_UID_ANNOTATION: &str = "mesh.openkcm.io/previous-uid";
/// Maximum number of previous UIDs that count.
const MAX_PREVIOUS_UIDS: usize = 16;

/// Returns the UIDs in the value of this annotation.
pub fn previous_uids(annotation: Option<&str>) -> impl Iterator<Item = &str> {
    let uids = annotation.into_iter().flat_map(|uids| uids.split(','));
    uids.take(MAX_PREVIOUS_UIDS)
}

/// The owner of a release, as seen by this Tenant or KryptonDeployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ownership {
    /// The release does not exist, and Krypton may create it.
    Free,
    Mine,
    /// Krypton must read this revision, the newest, first.
    Unread(u32),
    /// The release belongs to another owner. The message names the owner and the fix.
    Theirs(String),
}

impl Ownership {
    pub(super) fn into_foreign(self) -> Option<String> {
        match self {
            Self::Theirs(message) => Some(message),
            Self::Free | Self::Mine | Self::Unread(_) => None,
        }
    }
}

/// Returns the owner of the release. A release has one owner, and Krypton never takes it from another claimant.
pub(super) fn ownership(view: &View<'_>) -> Ownership {
    let ReleaseKey {
        namespace: workspace,
        name,
    } = view.release_key;
    let (owner, kind) = (view.owner, view.owner.kind());
    let label = view.revisions.iter().rev().find_map(|revision| {
        let uid = revision.owner_uid.as_deref()?;
        Some((uid, revision.owner_namespace.as_deref()))
    });
    let first = first_claimant(view, label.map(|(uid, _)| uid));
    if let Some(first) = first.filter(|first| first.uid() != owner.uid()) {
        let remedy = match owner {
            ReleaseOwner::Tenant(_) => "give this Tenant another workspace",
            ReleaseOwner::Deployment(_) => "give this KryptonDeployment another name",
        };
        return Ownership::Theirs(format!(
            "release {name} in namespace {workspace} belongs to {} {}/{}; {remedy}",
            first.kind(),
            first.namespace(),
            first.name(),
        ));
    }
    let Some(newest) = view.newest() else {
        // The Go operator's G3 CRD has no workspace field, so a Tenant written under that CRD loses the value.
        return view.elsewhere.map_or(Ownership::Free, |namespace| {
            Ownership::Theirs(format!(
                "krypton-operator installed release {name} in namespace {namespace}, but this Tenant names no workspace; \
                 delete the Tenant, which keeps that release, and create it again with \
                 spec.workspace: {namespace} and the annotation {}",
                names::fingerprint_annotation(view.cluster),
            ))
        });
    };
    let lockdown = view.desired.lockdown.no_cross_namespace_refs;
    let (adopted, remedy) = adoption(owner, lockdown, view.workspace, workspace);
    let theirs = |problem: String| {
        let message = format!("release {name} in namespace {workspace} {problem}; {remedy}");
        Ownership::Theirs(message)
    };
    match label {
        _ if adopted => Ownership::Mine,
        Some((uid, namespace)) => {
            let is_restored = previous_uids(owner.annotation(PREVIOUS_UID_ANNOTATION))
                .any(|previous| previous == uid);
            let is_ours = uid == owner.uid()
                || namespace == Some(owner.namespace())
                || (!lockdown && is_restored);
            match is_ours {
                true => Ownership::Mine,
                false => theirs(format!(
                    "was created for a deleted {kind} of namespace {}",
                    namespace.unwrap_or("unknown")
                )),
            }
        }
        None if !lockdown && view.original_fingerprint().is_some() => Ownership::Mine,
        None if !lockdown && owner.deployment().is_some() => match view.decoded(newest) {
            None => Ownership::Unread(newest.revision),
            Some(release) if view.has_desired_chart(release) => Ownership::Mine,
            Some(release) => theirs(format!(
                "is from chart {} and was not created by Krypton",
                release.chart_name
            )),
        },
        None => theirs("was not created by Krypton".to_owned()),
    }
}

/// Returns the claimant with the label's UID, or else the oldest one that may use the workspace.
fn first_claimant<'a>(view: &View<'a>, labelled_uid: Option<&str>) -> Option<&'a ReleaseOwner> {
    let mut claimants = view.claimants.iter();
    let owner = claimants.find(|claimant| Some(claimant.uid()) == labelled_uid);
    owner.or_else(|| {
        let mut claimants = view.claimants.iter();
        claimants.find(|claimant| may_use_workspace(view, claimant))
    })
}

/// Returns whether the owner may take over a release without its label, and how to permit that.
fn adoption(
    owner: &ReleaseOwner,
    lockdown: bool,
    workspace: Option<&Workspace>,
    namespace: &str,
) -> (bool, String) {
    let annotation = names::ADOPT_ANNOTATION;
    if lockdown {
        let is_open = workspace.is_some_and(|workspace| is_open_to(workspace, owner));
        let (owner_namespace, name) = (owner.namespace(), owner.name());
        let remedy = format!(
            "an operator of the cluster can annotate namespace {namespace} with \
             {annotation}={owner_namespace}/{name} to hand it over"
        );
        return (is_open, remedy);
    }
    let kind = owner.kind();
    let remedy = format!("annotate this {kind} with {annotation}=true to take it over");
    (owner.annotation(annotation) == Some("true"), remedy)
}

/// Whether `owner`, this owner or another claimant of the release, may use the workspace.
pub(super) fn may_use_workspace(view: &View<'_>, owner: &ReleaseOwner) -> bool {
    let lockdown = view.desired.lockdown.no_cross_namespace_refs;
    !lockdown || may_use(owner, view.release_key, view.workspace, view.newest())
}

/// Whether an operator of the cluster has opened the workspace to the owner.
fn is_open_to(workspace: &Workspace, owner: &ReleaseOwner) -> bool {
    let open_to = workspace.open_to.as_deref();
    open_to.and_then(|open_to| open_to.split_once('/')) == Some((owner.namespace(), owner.name()))
}

/// Whether lockdown lets the owner use its release's workspace. It may use its own namespace, a namespace created for
/// it, and a namespace that an operator of the cluster has opened to it.
pub(crate) fn may_use(
    owner: &ReleaseOwner,
    release: &ReleaseKey,
    workspace: Option<&Workspace>,
    newest: Option<&Revision>,
) -> bool {
    let Some(workspace) = workspace else {
        return true;
    };
    let created_for = workspace.creator.as_deref();
    // The Tenant was restored under another UID. Only a user with write access to the workspace can label a release
    // there.
    let was_created_for_owner = |revision: &Revision| {
        revision.owner_uid.is_some()
            && revision.owner_uid.as_deref() == created_for
            && revision.owner_namespace.as_deref() == Some(owner.namespace())
    };
    release.namespace == owner.namespace()
        || created_for == Some(owner.uid())
        || newest.is_some_and(was_created_for_owner)
        || is_open_to(workspace, owner)
}
