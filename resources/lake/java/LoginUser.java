package pgsieve.lake;

import java.lang.instrument.Instrumentation;
import org.apache.hadoop.security.UserGroupInformation;

/**
 * Tells Hadoop the name of its user, before Hadoop asks Java for it. On some platforms a container runs under a user id that has
 * no entry in /etc/passwd. Such a user has no name, and Java's own login module raises an error for it.
 */
public final class LoginUser {
    private LoginUser() {}

    public static void premain(String name, Instrumentation instrumentation) {
        UserGroupInformation.setLoginUser(UserGroupInformation.createRemoteUser(name));
    }
}
