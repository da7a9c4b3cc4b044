//! Names of Lease holders, and the conclusions that a process can draw from them. Pure functions.

/// The only container of its kind in its pod, as the first process of its PID namespace.
///
/// The kubelet starts a container of a pod only after the previous one has ended. A container ends when its
/// first process exits. The kernel completes that exit only after all other processes of the PID namespace,
/// including every Helm process, have died. This does not hold for a pod with one PID namespace for all
/// containers (`shareProcessNamespace`), or with the PID namespace of its node (`hostPID`). There, this
/// process is not the first one. It also does not hold if two containers of a pod receive the UID. The chart
/// passes it to one container only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnPod {
    uid: String,
}

impl OwnPod {
    /// `uid` is the UID of the pod, if configured. `process` is the process ID in this PID namespace.
    pub fn new(uid: Option<String>, process: u32) -> Option<Self> {
        let is_valid_uid = |uid: &String| {
            let is_valid_byte = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
            !uid.is_empty() && uid.bytes().all(is_valid_byte)
        };
        uid.filter(is_valid_uid)
            .filter(|_| process == 1)
            .map(|uid| Self { uid })
    }
}

/// Returns a unique name for this process. It differs from the name of the previous process of this agent.
pub fn agent_holder(replica: &str, pod: Option<&OwnPod>, random: u32) -> String {
    match pod {
        Some(pod) => format!("agent/{replica}/{random:08x}@{}", pod.uid),
        None => format!("agent/{replica}/{random:08x}"),
    }
}

/// Returns whether `holder` was an earlier container of this pod, which is dead.
pub(super) fn is_previous_container(holder: &str, me: &str) -> bool {
    let pod_uid = |name: &str| name.rsplit_once('@').map(|(_, uid)| uid.to_owned());
    holder != me && pod_uid(me).is_some() && pod_uid(holder) == pod_uid(me)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0b4d9a52-93a5-4f8a-b1c7-6f1f4cd0e7a1";

    #[test]
    fn own_pod_requires_first_process_and_valid_uid() {
        let own_pod = |uid: &str, process| OwnPod::new(Some(uid.to_owned()), process);
        assert!(own_pod(UID, 1).is_some());
        // A shared PID namespace, or a second process in the container, for example by `kubectl exec`.
        assert_eq!(own_pod(UID, 7), None);
        assert_eq!(OwnPod::new(None, 1), None);
        for no_uid in ["", "a b", "a@b", "a/b"] {
            assert_eq!(own_pod(no_uid, 1), None, "{no_uid}");
        }
    }

    #[test]
    fn previous_process_is_recognized_by_pod() {
        let pod = OwnPod::new(Some(UID.to_owned()), 1);
        let other = OwnPod::new(Some("another".to_owned()), 1);
        let me = agent_holder("krypton-agent-x", pod.as_ref(), 1);
        assert_eq!(me, format!("agent/krypton-agent-x/00000001@{UID}"));
        let rows = [
            (agent_holder("krypton-agent-x", pod.as_ref(), 2), true),
            // The replica's name does not matter if the pod is the same.
            (agent_holder("renamed", pod.as_ref(), 2), true),
            (me.clone(), false),
            (agent_holder("krypton-agent-x", other.as_ref(), 2), false),
            (agent_holder("krypton-agent-x", None, 2), false),
            // A user-defined name does not identify a pod.
            (agent_holder(&format!("x@{UID}"), None, 2), false),
            (String::new(), false),
        ];
        for (holder, expected) in rows {
            assert_eq!(is_previous_container(&holder, &me), expected, "{holder}");
        }
        let me = agent_holder("krypton-agent-x", None, 1);
        for holder in [me.as_str(), "agent/krypton-agent-x/00000002", ""] {
            assert!(!is_previous_container(holder, &me), "{holder}");
        }
    }
}
